"""Tool-call tasks: tools made of random words, a table of everyday tools, parallel calls, tool results, no fitting tool."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .words import VERB, Draw

# name | description | parameter:kind, ... | request / request ...; `{x}` is replaced by the value of x.
EVERYDAY = """
get_weather,weather,current_weather|Get the current weather for a place.|city:place|What is the weather in {city}?/How is the weather in {city} today?/Is it raining in {city}?/Weather for {city}, please.
get_forecast,forecast|Get the weather forecast for some days.|city:place,days:small|Give me the forecast for {city} for {days} days./What will the weather in {city} be over the next {days} days?
get_time,current_time,time_in|Get the current time in a city.|city:place|What time is it in {city}?/Tell me the time in {city}./What is the local time in {city}?
add,add_numbers,plus|Add two numbers.|a:integer,b:integer|What is {a} plus {b}?/Add {a} and {b}./Calculate {a} + {b}./Please compute the sum of {a} and {b}.
subtract,minus|Subtract one number from another.|a:integer,b:integer|What is {a} minus {b}?/Calculate {a} - {b}.
multiply,multiply_numbers,times|Multiply two numbers.|a:integer,b:integer|What is {a} times {b}?/Multiply {a} by {b}./Calculate {a} * {b}./Please compute the product of {a} and {b}.
divide|Divide one number by another.|a:number,b:number|Divide {a} by {b}./What is {a} divided by {b}?
search,web_search,search_web,find_pages|Search the web.|query:phrase|Search for {query}./Look up {query} on the web./Find pages about {query}./Search the web for "{query}".
send_email,email,mail_to|Send an email to a person.|to:email,subject:phrase|Send an email to {to} with the subject "{subject}"./Write to {to} about {subject}.
send_message,message,text_person|Send a short message to somebody.|name:person,text:phrase|Send {name} the message "{text}"./Tell {name}: {text}/Message {name} that says {text}
set_alarm,alarm|Set an alarm.|time:clock|Set an alarm for {time}./Wake me at {time}./I need an alarm at {time}.
set_timer,timer,start_timer|Start a countdown.|minutes:small|Set a timer for {minutes} minutes./Count down {minutes} minutes./Start a timer of {minutes} minutes.
create_reminder,remind,add_reminder|Create a reminder.|text:phrase,date:date|Remind me of {text} on {date}./Create a reminder for {date}: {text}
create_event,add_event,schedule|Put an event into the calendar.|title:phrase,date:date,time:clock|Put "{title}" into my calendar on {date} at {time}./Schedule {title} for {date} at {time}.
translate,translate_text|Translate a text into another language.|text:phrase,language:language|Translate "{text}" into {language}./How do you say {text} in {language}?
convert_currency,exchange|Convert money from one currency to another.|amount:small,source:currency,target:currency|Convert {amount} {source} to {target}./How much is {amount} {source} in {target}?
get_stock_price,stock_price,quote|Get the price of a share.|symbol:code|What is the price of {symbol}?/How much is one share of {symbol}?
play_music,play_song,play|Play a song.|title:phrase|Play {title}./I want to hear {title}./Put on the song {title}.
set_light,switch_light,light|Change the colour of a lamp.|room:word,colour:colour|Make the lamp in the {room} {colour}./Turn the light of the {room} {colour}.
set_temperature,heating,thermostat|Set the heating of a room.|room:word,degrees:small|Set the {room} to {degrees} degrees./Heat the {room} to {degrees} degrees.
book_table,reserve_table|Book a table in a restaurant.|restaurant:phrase,people:small,time:clock|Book a table for {people} at {restaurant} at {time}./Reserve a table at {restaurant} for {people} people at {time}.
book_flight,find_flight,flights|Find a flight between two cities.|origin:place,destination:place,date:date|Book a flight from {origin} to {destination} on {date}./I want to fly from {origin} to {destination} on {date}.
get_distance,distance|Get the distance between two places.|origin:place,destination:place|How far is it from {origin} to {destination}?/What is the distance between {origin} and {destination}?
read_file,open_file,cat|Read a file.|path:path|Read the file {path}./Show me what is in {path}./Open {path}.
write_file,save_file|Write a text into a file.|path:path,text:phrase|Write "{text}" into {path}./Save {text} to the file {path}.
delete_file,remove_file|Delete a file.|path:path|Delete {path}./Remove the file {path}.
list_files,ls|List the files of a folder.|folder:word|Which files are in {folder}?/List the folder {folder}.
get_user,find_user,user_info|Look up a user by number.|id:integer|Who is user {id}?/Look up the user with id {id}./Get user {id}.
create_user,add_user,register|Create an account for a person.|name:person,age:small|Create a user named {name} who is {age} years old./Add the user {name}, age {age}.
get_order,order_status|Get the state of an order.|number:integer|Where is my order {number}?/What is the state of order {number}?
add_to_cart,buy,add_item|Put an article into the shopping cart.|article:word,count:small|Put {count} {article} into my cart./I want to buy {count} {article}.
get_recipe,recipe|Find a recipe.|dish:phrase|How do I cook {dish}?/Find a recipe for {dish}.
get_news,news,headlines|Get the latest news about a topic.|topic:phrase|What is new about {topic}?/Give me the news on {topic}.
define,define_word,dictionary|Look up the meaning of a word.|word:word|What does {word} mean?/Define {word}./Look up the word {word}.
get_population,population|Get how many people live in a place.|city:place|How many people live in {city}?/What is the population of {city}?
roll_dice,dice|Roll dice.|sides:small,count:small|Roll {count} dice with {sides} sides.
random_number,pick_number|Pick a random number in a range.|low:small,high:integer|Pick a number between {low} and {high}./Give me a random number from {low} to {high}.
square_root,sqrt|Compute the square root of a number.|x:integer|What is the square root of {x}?/Compute the root of {x}.
call_person,phone,dial|Call somebody on the phone.|name:person|Call {name}./Phone {name}, please.
lock_door,door|Lock or unlock a door.|door:word,locked:boolean|Set the {door} door to locked {locked}./Door {door}: locked {locked}.
run_query,query_database,sql|Run a query on a table.|table:word,limit:small|Show {limit} rows of the table {table}./Query {table}, at most {limit} rows.
get_capital,capital|Get the capital of a country.|country:word|Which city is the capital of {country}?
save_note,note,write_note|Keep a note.|text:phrase|Note: {text}/Write down {text}./Keep a note that says {text}
lookup,find_answer,knowledge|Look up a fact.|question:phrase|Look up {question}./Find out about {question}.
rate,give_rating|Rate something from 1 to 30.|thing:word,stars:small|Give {thing} a rating of {stars}./Rate {thing} with {stars}.
"""
TITLE = str.title
# Other words for the verbs of invented tools: a closed table, no word belongs to two verbs.
SYNONYMS = {
    "get": "obtain/retrieve", "set": "put a value on/configure", "find": "locate/look for", "send": "transmit/dispatch", "create": "set up/produce",
    "delete": "erase/get rid of", "list": "enumerate/show all of", "update": "refresh/bring up to date", "search": "look through/hunt through",
    "start": "launch/begin", "stop": "halt/end", "check": "verify/inspect", "open": "unseal/uncover", "close": "shut/seal", "read": "go through/peruse",
    "write": "put down/author", "add": "append/include", "remove": "take away/take out", "book": "reserve/make a reservation for", "order": "purchase/request delivery of",
    "move": "shift/relocate", "copy": "duplicate/clone", "count": "tally/tell the number of", "show": "display/present", "load": "bring in/import",
    "save": "store/keep", "merge": "combine/join together", "split": "divide/break up", "sort": "arrange/put in order", "filter": "sift/narrow down",
    "play": "perform/put on", "pause": "hold/interrupt", "lock": "secure/bolt", "unlock": "release/unbolt", "rename": "give a new name to/retitle",
    "attach": "fasten/connect", "fetch": "bring/go and get", "compute": "work out/calculate", "plan": "prepare/map out", "track": "follow/monitor",
}  # fmt: skip
WORDS_FOR = {verb: tuple(text.split("/")) for verb, text in SYNONYMS.items()}


@dataclass
class ToolCase:
    """One drawn tool: its wire object, the values of a fitting call and requests for it."""

    wire: dict[str, Any]
    name: str
    values: dict[str, Any]
    request: str
    purpose: str
    spec: tuple[list[tuple[str, str]], dict[str, str], list[str]] | None = None


def _table() -> list[tuple[list[str], str, list[tuple[str, str]], list[str]]]:
    rows = []
    for line in EVERYDAY.strip().split("\n"):
        names, description, parameters, requests = line.split("|")
        pairs = [tuple(p.split(":")) for p in parameters.split(",")]
        rows.append((names.split(","), description, pairs, requests.split("/")))
    return rows  # type: ignore[return-value]


TABLE = _table()
JSON_TYPE = {"integer": "integer", "small": "integer", "number": "number", "boolean": "boolean", "array": "array"}


def shown(value: Any) -> str:
    """How a request writes a value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def wire_tool(
    draw: Draw, name: str, description: str, properties: dict[str, Any], required: list[str]
) -> dict[str, Any]:
    """A tool object in one of the common spellings: key order, titles and extra keys differ between clients."""
    style = draw.rng.random()
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if style < 0.3:
        schema = {"properties": properties, "required": required, "type": "object"}
    elif style < 0.4:
        schema = {"type": "object", "properties": properties}
    elif style < 0.5:
        schema["additionalProperties"] = False
    if draw.chance(0.1):
        for key, entry in properties.items():
            entry["title"] = TITLE(key.replace("_", " "))
    function: dict[str, Any] = {"name": name, "description": description, "parameters": schema}
    if not description:
        del function["description"]
    if draw.chance(0.05):
        function["strict"] = True
    return {"type": "function", "function": function}


def bounds(draw: Draw, value: float) -> dict[str, Any]:
    """Limits of a number that the value keeps."""
    out: dict[str, Any] = {}
    if draw.chance(0.7):
        low = draw.one((0, 1, -1, -(10 ** draw.rng.randint(1, 6)), int(value) - draw.rng.randint(1, 500)))
        if low < value:
            out[draw.one(("minimum", "exclusiveMinimum", "ge"))] = low
    if draw.chance(0.7) or not out:
        high = draw.one((100, 10 ** draw.rng.randint(1, 6), int(value) + draw.rng.randint(1, 500)))
        if high > value:
            out[draw.one(("maximum", "exclusiveMaximum", "le"))] = high
    return out


def dressed(draw: Draw, entry: dict[str, Any], value: Any) -> dict[str, Any]:
    """A parameter as clients write it: with limits, defaults, formats and examples, its keys in any order."""
    out = dict(entry)
    if isinstance(value, int | float) and not isinstance(value, bool):
        out |= bounds(draw, value)
    elif isinstance(value, str) and "enum" not in entry:
        more: tuple[dict[str, Any], ...] = (
            {"minLength": draw.rng.randint(0, 2)}, {"maxLength": draw.rng.randint(60, 500)}, {"format": draw.word()}, {"pattern": "^.+$"},
            {"examples": [draw.word(), draw.word()]}, {"minLength": 1, "maxLength": 10 ** draw.rng.randint(2, 4)},
        )  # fmt: skip
        out |= draw.one(more)
    if draw.chance(0.15):
        out["default"] = draw.one((None, draw.value(entry["type"]) if entry["type"] in JSON_TYPE else draw.word()))
    if draw.chance(0.1) and set(out) <= {"type", "description", "title", "default"}:
        out["anyOf"] = [{"type": out.pop("type")}, {"type": "null"}]
    keys = list(out)
    draw.rng.shuffle(keys)
    return {key: out[key] for key in keys}


def choice_set(draw: Draw, count: int) -> tuple[list[dict[str, Any]], ToolCase]:
    """Tools that share their noun or their verb, and one asked for in other words than its own."""
    noun, verbs = draw.word(), draw.rng.sample(list(WORDS_FOR), count)
    nouns = [noun] * count
    if draw.chance(0.35):
        verbs, nouns = [verbs[0]] * count, draw.words(count)
    elif draw.chance(0.4):
        nouns = draw.words(count)
    cases = [random_tool(draw, 2, verb, thing) for verb, thing in zip(verbs, nouns, strict=True)]
    case, verb, noun = cases[0], verbs[0], nouns[0]
    said = ", ".join(f"{key} {shown(value)}" for key, value in case.values.items())
    lead = draw.one(
        (
            "Please {p} the {n}",
            "{p} the {n}",
            "Can you {p} the {n}",
            "I would like to {p} the {n}",
            "Help me {p} the {n}",
        )
    )
    text = lead.format(p=draw.one(WORDS_FOR[verb]), n=noun)
    if said:
        text += draw.one((f" with {said}", f", {said}", f": {said}", f" ({said})"))
    case.request = text[0].upper() + text[1:] + draw.one((".", "", "."))
    tools = [one.wire for one in cases]
    draw.rng.shuffle(tools)
    return tools, case


def called(draw: Draw, name: str, values: dict[str, Any]) -> str:
    """A request that writes the call as code."""
    bare = ", ".join(json.dumps(v, ensure_ascii=False) if isinstance(v, str) else shown(v) for v in values.values())
    named = ", ".join(
        f"{k}={json.dumps(v, ensure_ascii=False) if isinstance(v, str) else shown(v)}" for k, v in values.items()
    )
    forms = ("What does {n}({v}) give?", "What is the result of {n}({v})?", "Evaluate {n}({v}).", "Run {n}({v})", "Call {n}({v}), please.",
             "Use the tool to compute {n}({v}).", "I need {n}({v}).", "Tell me {n}({v}).", "What is {n} of {v}?", "Apply {n} to {v}.")  # fmt: skip
    return str(draw.one(forms).format(n=name, v=draw.one((bare, bare, named))))


def random_tool(draw: Draw, most: int = 4, verb: str = "", noun: str = "") -> ToolCase:
    """A tool whose name, parameters and values are random words; a given verb or noun is used."""
    plain = bool(verb)
    verb, noun = verb or (draw.one(VERB) if draw.chance(0.6) else draw.word()), noun or draw.word()
    pick = draw.rng.random() * (0.65 if plain else 1.0)
    name = (
        f"{verb}_{noun}"
        if pick < 0.65
        else noun
        if pick < 0.8
        else f"{verb}{noun.capitalize()}"
        if pick < 0.9
        else f"{verb}_{noun}_{draw.word()}"
    )
    description = draw.one(
        (
            f"{verb.capitalize()} the {noun}.",
            f"{verb.capitalize()} a {noun}.",
            f"Use this to {verb} the {noun}.",
            f"{noun.capitalize()}: {verb} it.",
            "",
        )
    )
    count = draw.one([n for n in (0, 1, 1, 2, 2, 2, 3, 4) if n <= most])
    whole = draw.chance(0.15)
    properties: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for key in draw.words(count):
        if draw.chance(0.15):
            key = f"{key}_{draw.word()}"
        kind = draw.one(
            ("string",) * 5
            + ("integer",) * 3
            + ("number", "boolean", "enum", "enum", "array", "place", "person", "date", "foreign")
        )
        kind = "integer" if whole else kind
        entry: dict[str, Any] = {"type": JSON_TYPE.get(kind, "string")}
        if kind == "enum":
            entry["enum"] = draw.words(draw.rng.randint(2, 4))
            values[key] = draw.one(entry["enum"])
        else:
            values[key] = draw.value(kind)
        if kind == "array":
            entry["items"] = {"type": "string"}
        if draw.chance(0.3):
            entry["description"] = draw.one(
                (f"The {key.replace('_', ' ')}.", f"{key.replace('_', ' ')} of the {noun}", "A value.")
            )
        properties[key] = dressed(draw, entry, values[key]) if draw.chance(0.25) else entry
    required = list(properties)
    if len(properties) > 1 and draw.chance(0.2):
        optional = draw.one(required)
        required.remove(optional)
        if draw.chance(0.5):
            del values[optional]
    keys = list(values)
    draw.rng.shuffle(keys)
    forms = ("{k} {v}", "{k} = {v}", "{k}: {v}", "{k} set to {v}", "the {k} {v}", '{k} "{v}"')
    parts = [draw.one(forms).format(k=k if draw.chance(0.7) else k.replace("_", " "), v=shown(values[k])) for k in keys]
    said = " and ".join(parts) if len(parts) < 3 and draw.chance(0.6) else ", ".join(parts)
    calling = draw.one((name, name.replace("_", " "), f"{verb} the {noun}"))
    lead = draw.one(("Please {n}", "{n}", "Call {n}", "I want to {n}", "Use {n}", "Can you {n}", "Run {n}", "Now {n}"))
    text = lead.format(n=calling)
    if said:
        text += draw.one((f" with {said}", f", {said}", f": {said}", f" ({said})", f" using {said}"))
    if values and draw.chance(0.35 if whole else 0.06):
        text, lead = called(draw, name, values), ""
        text += draw.one(("", "", " Use the tool.", " Use the function.", f" Use {name}."))
        return ToolCase(
            wire_tool(draw, name, description, properties, required), name, values, text, f"{verb} the {noun}"
        )
    text += draw.one((".", "", "?" if lead.startswith("Can") else ".", " please."))
    return ToolCase(
        wire_tool(draw, name, description, properties, required),
        name,
        values,
        text[0].upper() + text[1:] if draw.chance(0.7) else text,
        f"{verb} the {noun}",
    )


def everyday_tool(draw: Draw) -> ToolCase:
    """A tool of the table under one of its names; parameter names vary a little."""
    names, description, parameters, requests = draw.one(TABLE)
    name = draw.one(names)
    rename: dict[str, str] = {}
    for key, _ in parameters:
        swap = {
            "city": ("city", "location", "place"),
            "a": ("a", "x", "first"),
            "b": ("b", "y", "second"),
            "query": ("query", "q", "text"),
        }
        rename[key] = draw.one(swap.get(key, (key,)))
    if {"a", "b"} <= rename.keys():
        rename["a"], rename["b"] = draw.one(
            (
                ("a", "b"),
                ("x", "y"),
                ("first", "second"),
                ("left", "right"),
                ("first_number", "second_number"),
                ("first_int", "second_int"),
            )
        )
    values: dict[str, Any] = {}
    properties: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for key, kind in parameters:
        value = draw.value(kind)
        kind_name = JSON_TYPE.get(kind, "string")
        entry: dict[str, Any] = {"type": kind_name}
        if draw.chance(0.3):
            entry["description"] = f"The {key}."
        if draw.chance(0.15) and kind_name == "integer" and isinstance(value, int):
            entry["type"] = "number"
        properties[rename[key]] = dressed(draw, entry, value) if draw.chance(0.25) else entry
        values[rename[key]] = value
        texts[key] = shown(value)
    request = draw.one(requests).format(**texts)
    if draw.chance(0.15):
        request = draw.one(("Please: ", "Hi! ", "Hello, ", "Quick question: ", "Could you help me? ")) + request
    elif draw.chance(0.1):
        request += draw.one(
            (f" Use {name}.", f" Please use the {name} tool.", " Thanks!", f" Call the function {name}.")
        )
    return ToolCase(
        wire_tool(draw, name, description if draw.chance(0.9) else "", properties, list(properties)),
        name,
        values,
        request,
        description.rstrip(".").lower(),
        (parameters, rename, requests),
    )


def again(draw: Draw, case: ToolCase) -> ToolCase:
    """Another call of an everyday tool: the same object, new values."""
    assert case.spec is not None
    parameters, rename, requests = case.spec
    fresh = {key: draw.value(kind) for key, kind in parameters}
    request = draw.one(requests).format(**{key: shown(value) for key, value in fresh.items()})
    return ToolCase(
        case.wire, case.name, {rename[key]: value for key, value in fresh.items()}, request, case.purpose, case.spec
    )


def any_tool(draw: Draw, most: int = 4) -> ToolCase:
    """A random-word tool or one of the table."""
    return random_tool(draw, most) if draw.chance(0.6) else everyday_tool(draw)


def tool_set(draw: Draw, count: int, wanted: int = 1, most: int = 4) -> tuple[list[dict[str, Any]], list[ToolCase]]:
    """`count` tools of different names and the cases of the first `wanted`, shuffled into the list."""
    cases: list[ToolCase] = []
    seen: set[str] = set()
    purposes: set[str] = set()
    while len(cases) < count:
        case = any_tool(draw, min(most, 4 if count < 4 else 2))
        if case.name not in seen and case.purpose not in purposes:
            seen.add(case.name)
            purposes.add(case.purpose)
            cases.append(case)
    tools = [case.wire for case in cases]
    draw.rng.shuffle(tools)
    return tools, cases[:wanted]


def result_text(draw: Draw) -> tuple[str, str]:
    """What a tool returned, and how the answer says it."""
    pick = draw.rng.random()
    if pick < 0.25:
        value = shown(draw.value(draw.one(("integer", "number", "small"))))
        return value, value
    if pick < 0.6:
        value = draw.one((draw.phrase, draw.word, draw.name, draw.place))()
        return value, value
    if pick < 0.7:
        value = (
            f"{draw.one(('sunny', 'cloudy', 'rainy', 'windy', 'clear', 'foggy'))}, {draw.rng.randint(-10, 38)} degrees"
        )
        return value, value
    entries = {
        key: draw.value(draw.one(("string", "integer", "boolean"))) for key in draw.words(draw.rng.randint(1, 2))
    }
    spoken = " and ".join(f"{key} is {shown(value)}" for key, value in entries.items())
    return json.dumps(entries, ensure_ascii=False), spoken
