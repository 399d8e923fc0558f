"""`ninfer` with a scripted engine: the words of the last user message choose what happens."""

from __future__ import annotations

from ninfer_cli.main import main
from ninfer_cli.run import LoadOptions

from ninfer_core.errors import EngineFailedError, MemoryPlanError
from ninfer_core.testing import Delay, Fault, Reply, Script, ScriptedEngine, Tokens
from ninfer_core.types import Request, ToolCall

COUNT = " ".join(map(str, range(1, 301)))


def says(word: str):
    return lambda request: word in request.messages[-1].text


def echo(request: Request) -> Reply:
    users = [message.text for message in request.messages if message.role == "user"]
    system = "".join(message.text for message in request.messages if message.role == "system")
    text = f"turn {len(users)}: {users[-1]}"
    if system:
        text += f" [system: {system}]"
    if "seed" in users[-1]:
        text += f" [seed {request.sampling.seed}]"
    return Reply(text, reasoning="Hmm, let me see.")


def engine(context: int) -> ScriptedEngine:
    return ScriptedEngine(
        Script(lambda request: Reply(COUNT, reasoning="counting"), when=says("count"), rate=200, burst=2),
        Script([Tokens("a", "\x1b[31m", "b")], when=says("escape")),
        Script(Reply("", tool_calls=[ToolCall("", "weather", {"city": "Paris"})]), when=says("tool")),
        Script(["half an ans", Fault(ValueError("boom"))], when=says("fail")),
        Script(["tell me</think>\n\n", "slow ", Delay(30), "end"], when=says("hang")),
        Script(echo),
        context_length=context,
    )


def load(name: str, path: object, options: LoadOptions) -> ScriptedEngine:
    if "memory" in name:
        raise MemoryPlanError("the model needs 20.0 GB\n  weights 17.5 GB\nuse a smaller --context")
    if "broken" in name:
        raise EngineFailedError("the engine failed while loading")
    if "bug" in name:
        raise RuntimeError("unexpected")
    return engine(options.context or 600)


if __name__ == "__main__":
    main(loader=load)
