"""Makes the expected texts of tests/chat_template_test.cpp and tests/jinja_test.cpp with the reference engine.

python make_chat_template_data.py   (Python 3.11.7, jinja2 3.1.6)
Reads *.jinja and conversations.json, vectors_in.json beside this file; writes renders.json and vectors.json.
The environment is the one of the reference renderer: trim_blocks, lstrip_blocks, loop controls, no autoescape, a plain
tojson, immutable sandbox. Arguments given as JSON text are parsed first, except for templates that add them to a string
(deepseek_v3). A message whose null content makes the template fail is rendered with "" in its place.
"""
import datetime
import json
import pathlib

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = pathlib.Path(__file__).parent
CLOCK = datetime.datetime(2025, 1, 2, 3, 4, 5)
WANTS_TEXT_ARGUMENTS = {"deepseek_v3"}
BOS = {"deepseek_v3": {"bos_token": "<｜begin▁of▁sentence｜>"}}


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = CLOCK.strftime
    return env


def prepared(messages, parse_arguments, null_content):
    messages = json.loads(json.dumps(messages))
    for message in messages:
        if message.get("content") is None:
            message["content"] = null_content
        for call in message.get("tool_calls") or []:
            function = call.get("function", call)
            if parse_arguments and isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"])
    return messages


def render(env, name, source, row):
    for null_content in (None, ""):
        try:
            return env.from_string(source).render(
                messages=prepared(row["messages"], name not in WANTS_TEXT_ARGUMENTS, null_content),
                tools=row.get("tools"), documents=None, add_generation_prompt=row.get("add_generation_prompt", True),
                **BOS.get(name, {}), **row.get("kwargs", {}))
        except (TypeError, jinja2.exceptions.TemplateError):
            continue
    return None


def main():
    env = environment()
    rows = json.loads((HERE / "conversations.json").read_text())
    renders = []
    for name in ("qwen3", "deepseek_v3", "demo"):
        source = (HERE / f"{name}.jinja").read_bytes().decode()
        for i, row in enumerate(rows):
            text = render(env, name, source, row)
            if text is not None:
                renders.append({"template": name, "conversation": i, "expected": text})
    (HERE / "renders.json").write_text(json.dumps(renders, ensure_ascii=False, indent=1) + "\n")
    vectors = []
    for row in json.loads((HERE / "vectors_in.json").read_text()):
        try:
            made = {"expected": env.from_string(row["template"]).render(**row.get("context", {}))}
        except Exception:
            made = {"error": True}
        vectors.append({**row, **made})
    (HERE / "vectors.json").write_text(json.dumps(vectors, ensure_ascii=False, indent=1) + "\n")


main()
