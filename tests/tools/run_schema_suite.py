"""Runs the JSON-Schema-Test-Suite against the grammar compiler: `python tests/tools/run_schema_suite.py FOLDER_OR_SDIST`.

The suite comes inside the source distribution of `jsonschema` (`pip download --no-binary jsonschema --no-deps
jsonschema`). For every keyword it prints how many groups are enforced, how many are refused by name, and each case
where an enforced schema lets an invalid instance through. An instance that is valid but not accepted (members in
another order, say) is counted, as the grammar may be narrower than the schema. Exits with 1 if anything invalid passes.
"""

from __future__ import annotations

import json
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "core"), str(Path(__file__).parents[2])]

from constrained import TOKENIZER, VOCABULARY, asking  # noqa: E402

from ninfer_core.errors import SchemaError  # noqa: E402
from ninfer_core.runtime.grammar import compile_plan  # noqa: E402


def suite(source: Path) -> Iterator[tuple[str, list[dict]]]:
    """The files of draft 2020-12, by keyword."""
    if source.is_dir():
        for path in sorted(source.glob("**/tests/draft2020-12/*.json")):
            yield path.stem, json.loads(path.read_text())
        return
    with tarfile.open(source) as archive:
        for member in archive.getmembers():
            parts = Path(member.name).parts
            if parts[-3:-1] == ("tests", "draft2020-12") and member.name.endswith(".json"):
                data = archive.extractfile(member)
                assert data is not None
                yield Path(member.name).stem, json.loads(data.read())


def accepts(plan: object, text: str) -> bool:
    matcher = plan.matcher.deep_copy()
    ids = TOKENIZER.encode(text, allow_special=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def main(source: Path) -> int:
    wrong = 0
    total: Counter[str] = Counter()
    for keyword, groups in suite(source):
        counts: Counter[str] = Counter()
        for group in groups:
            try:
                plan = compile_plan(asking(group["schema"]), VOCABULARY)
            except SchemaError as error:
                counts["refused"] += 1
                if not str(error):
                    raise
                continue
            counts["enforced"] += 1
            for test in group["tests"]:
                taken = accepts(plan, json.dumps(test["data"], ensure_ascii=False))
                if test["valid"]:
                    counts["valid taken" if taken else "valid left out"] += 1
                elif taken:
                    counts["INVALID TAKEN"] += 1
                    print(
                        f"  {keyword}: {group['description']} / {test['description']}: {json.dumps(test['data'])[:80]}"
                    )
                else:
                    counts["invalid refused"] += 1
        wrong += counts["INVALID TAKEN"]
        total += counts
        print(f"{keyword:24s}", dict(counts))
    print("in all", dict(total))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
