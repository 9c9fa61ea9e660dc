#!/usr/bin/env python3
"""Writes python/src/rlood/types.py: what the Python client takes and returns, as openapi/openapi.json describes it.

    scripts/python_types.py            writes the file
    scripts/python_types.py --check    fails when the file is not what this would write
"""

import json
import keyword
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "python/src/rlood/types.py"
# The client's arguments and answers; all that these refer to is written too.
ROOTS = [
    "Checkpoint", "Dataset", "DatasetMap", "Event", "Export", "ExportRequest", "GenerationRequest", "GenerationResult", "Job",
    "JobSpec", "MetricsRow", "Model", "Problem", "Push", "PushRequest", "Sample", "Summary", "Verdict", "VerdictRequest",
    "VerdictRow",
]
HEADER = '''"""What the API takes and returns. Generated from openapi/openapi.json by scripts/python_types.py: do not edit.

These are plain dicts. The names are for editors and type checkers; nothing is checked when a program runs, and an answer
may have fields that are not named here.
"""

from __future__ import annotations

from typing import Any, Dict, List, Literal, Optional, TypedDict, Union
'''
PLAIN = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
MOST_COLUMNS = 120


class Types:
    """The definitions so far, in the order in which they must stand: no definition is used before it is made."""

    def __init__(self, schemas):
        self.schemas = schemas
        self.done = {}
        self.text = []
        # The objects that the document does not name, by their fields: equal ones are one class.
        self.unnamed = {}

    def named(self, name):
        """The expression for a schema of the document, which is defined first where it has a definition."""
        if name not in self.done:
            # A schema that refers to itself finds its name here.
            self.done[name] = f'"{name}"'
            schema = self.schemas[name]
            fields = self.fields(schema)
            if fields is None:
                expression = self.expression(schema, name)
                self.text.append(wrapped(f"{name} = ", expression))
            else:
                self.define(name, self.typed(name, fields), schema.get("description"))
            self.done[name] = name
        return self.done[name]

    def fields(self, schema):
        """The fields of an object, `{name: (schema, required)}`; None for anything else."""
        if "$ref" in schema:
            return self.fields(self.schemas[schema["$ref"].rsplit("/", 1)[1]])
        if "allOf" in schema:
            parts = [self.fields(part) for part in schema["allOf"]]
            return None if None in parts else {name: field for part in parts for name, field in part.items()}
        if not schema.get("properties"):
            return None
        required = schema.get("required", [])
        return {name: (field, name in required) for name, field in schema["properties"].items()}

    def typed(self, name, fields):
        """The fields as `{name: (expression, required)}`."""
        return {key: (self.expression(field, name + camel(key)), required) for key, (field, required) in fields.items()}

    def define(self, name, typed, description):
        always = {key: expression for key, (expression, required) in typed.items() if required}
        sometimes = {key: expression for key, (expression, required) in typed.items() if not required}
        about = first_sentence(description)
        if always and sometimes:
            self.write_class(f"_{name}Required", "TypedDict", always, None, True)
            self.write_class(name, f"_{name}Required", sometimes, about, False)
        else:
            self.write_class(name, "TypedDict", always or sometimes, about, not sometimes)

    def write_class(self, name, base, fields, about, total):
        if any(not key.isidentifier() or keyword.iskeyword(key) for key in fields):
            # Such a field cannot stand in a class. It gets a base of its own, made by a call.
            pairs = ", ".join(f"{json.dumps(key)}: {json.dumps(expression)}" for key, expression in fields.items())
            self.text.append(f'{name}Fields = TypedDict("{name}Fields", {{{pairs}}}, total={total})')
            base, fields = f"{name}Fields", {}
        lines = [f"class {name}({base}):" if total else f"class {name}({base}, total=False):"]
        if about:
            lines += [f'    """{about}"""', ""]
        lines += [wrapped(f"    {key}: ", expression) for key, expression in fields.items()] or ["    pass"]
        self.text.append("\n".join(lines))

    def expression(self, schema, name):
        """A type in Python's words. `name` is for an object that the document does not name."""
        if not isinstance(schema, dict):
            return "Any"
        if "$ref" in schema:
            return self.named(schema["$ref"].rsplit("/", 1)[1])
        if "enum" in schema:
            return f"Literal[{', '.join(map(literal, schema['enum']))}]"
        if "const" in schema:
            return f"Literal[{literal(schema['const'])}]"
        for word in ("oneOf", "anyOf"):
            if word in schema:
                options = schema[word]
                numbered = len([option for option in options if option.get("type") != "null"]) > 1
                return union([self.expression(option, f"{name}{number if numbered else ''}")
                              for number, option in enumerate(options, 1)])
        fields = self.fields(schema)
        if fields is not None:
            typed = self.typed(name, fields)
            shape = json.dumps(typed, sort_keys=True)
            if shape not in self.unnamed:
                while name in self.schemas:
                    name += "Fields"
                self.define(name, typed, schema.get("description"))
                self.unnamed[shape] = name
            return self.unnamed[shape]
        if "allOf" in schema:
            return self.expression(schema["allOf"][0], name) if len(schema["allOf"]) == 1 else "Dict[str, Any]"
        kinds = schema.get("type", [])
        return union([self.kind(kind, schema, name) for kind in (kinds if isinstance(kinds, list) else [kinds])]) or "Any"

    def kind(self, kind, schema, name):
        if kind == "array":
            return f"List[{self.expression(schema.get('items'), name + 'Item')}]"
        if kind == "object":
            values = schema.get("additionalProperties")
            return f"Dict[str, {self.expression(values, name + 'Value') if values else 'Any'}]"
        return PLAIN[kind]


def literal(value):
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def union(expressions):
    """`Union[…]` or `Optional[…]` of what is different."""
    kinds = list(dict.fromkeys(expressions))
    rest = [kind for kind in kinds if kind != "None"]
    if not rest or "Any" in rest:
        return "Any" if rest else "None" if kinds else ""
    joined = rest[0] if len(rest) == 1 else f"Union[{', '.join(rest)}]"
    return f"Optional[{joined}]" if "None" in kinds else joined


def camel(key):
    return "".join(word[:1].upper() + word[1:] for word in key.split("_"))


def first_sentence(description):
    sentence = " ".join((description or "").split()).split(". ")[0].rstrip(".")
    sentence = sentence.replace("\\", "\\\\").replace('"', "'")
    return f"{sentence}." if sentence else None


def wrapped(before, expression):
    """A line, or several where the list of a union or of words is long."""
    line = before + expression
    if len(line) <= MOST_COLUMNS or "[" not in expression or not expression.startswith(("Union[", "Literal[")):
        return line
    indent = " " * (len(before) - len(before.lstrip()) + 4)
    head, inside = expression.split("[", 1)
    depth, item, items = 0, "", []
    for letter in inside[:-1]:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            items.append(item.strip())
            item = ""
        else:
            item += letter
    items.append(item.strip())
    return f"{before}{head}[\n" + "".join(f"{indent}{item},\n" for item in items) + f"{indent[4:]}]"


def generated():
    document = json.loads((ROOT / "openapi/openapi.json").read_text())
    types = Types(document["components"]["schemas"])
    missing = [name for name in ROOTS if name not in types.schemas]
    if missing:
        raise SystemExit(f"openapi/openapi.json has no {', '.join(missing)}: rlood openapi > openapi/openapi.json")
    for name in ROOTS:
        types.named(name)
    return HEADER + "".join(("\n" if " = " in text.split("\n")[0] else "\n\n") + text + "\n" for text in types.text)


def main():
    text = generated()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text)
    elif TARGET.read_text() != text:
        raise SystemExit("python/src/rlood/types.py is stale: scripts/python_types.py")


if __name__ == "__main__":
    main()
