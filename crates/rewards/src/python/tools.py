# Continues server.py: tools of environments, from methods with type hints and docstrings in Google's style.


JSON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
JSON_TYPES_OF_CONTAINERS = {list: "array", tuple: "array", dict: "object"}


def schema_of(function):
    """Returns the OpenAI function schema of a function or method. Raises NotLoaded for one that has none."""
    import inspect
    import typing

    name = getattr(function, "__name__", "tool")
    text = inspect.getdoc(function)
    if not text:
        raise NotLoaded("tool_not_usable", "tool '%s' has no docstring: say in one what the tool does" % name)
    description, arguments, returned = read_docstring(text.strip())
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise NotLoaded("tool_not_usable", "the type hints of tool '%s' cannot be read: %s" % (name, told(error))) from None
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise NotLoaded("tool_not_usable", "tool '%s' must name its arguments, without * and **" % name)
        if parameter.name not in hints:
            text = "argument '%s' of tool '%s' has no type hint: write %s: str, or what it is"
            raise NotLoaded("tool_not_usable", text % (parameter.name, name, parameter.name))
        try:
            schema = schema_of_type(hints[parameter.name])
        except TypeError as error:
            text = "argument '%s' of tool '%s': %s"
            raise NotLoaded("tool_not_usable", text % (parameter.name, name, error)) from None
        properties[parameter.name] = described_argument(schema, arguments.get(parameter.name))
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    whole = {"name": name, "description": description, "parameters": parameters}
    try:
        if "return" in hints:
            whole["return"] = schema_of_type(hints["return"])
            if returned:
                whole["return"]["description"] = returned
    except TypeError:
        # The model never writes the returned value, so a type without a schema is no obstacle.
        del whole["return"]
    return {"type": "function", "function": whole}


def described_argument(schema, text):
    """Adds an argument's description, which may end with its choices: (choices: ["a", "b"])."""
    if not text:
        return schema
    before, mark, choices = text.rpartition("(choices:")
    if mark and choices.rstrip().endswith(")"):
        try:
            schema["enum"] = json.loads(choices.rstrip()[:-1])
            text = before.strip()
        except ValueError:
            pass
    schema["description"] = text
    return schema


def read_docstring(text):
    """Returns the description, the arguments' descriptions by name, and the description of the returned value."""
    sections = {"": []}
    current = sections[""]
    for line in text.splitlines():
        if line.strip() in ("Args:", "Returns:", "Raises:"):
            current = sections.setdefault(line.strip(), [])
        else:
            current.append(line)
    arguments, indent, last = {}, None, None
    for line in sections.get("Args:", []):
        if not line.strip():
            continue
        width = len(line) - len(line.lstrip())
        indent = width if indent is None else indent
        name, colon, rest = line.strip().partition(":")
        # "word (str): The guess" names its type too.
        name = name.split("(")[0].strip()
        if width <= indent and colon and name.isidentifier():
            last = name
            arguments[last] = rest.strip()
        elif last is not None:
            arguments[last] = (arguments[last] + " " + line.strip()).strip()
    returned = "\n".join(line.strip() for line in sections.get("Returns:", [])).strip()
    return "\n".join(sections[""]).strip(), arguments, returned


def schema_of_type(hint):
    """Returns the JSON Schema of a type hint. Raises TypeError for a type that JSON does not have."""
    import enum
    import typing

    if hint is typing.Any:
        return {}
    if hint in JSON_TYPES:
        return {"type": JSON_TYPES[hint]}
    if hint in JSON_TYPES_OF_CONTAINERS:
        return {"type": JSON_TYPES_OF_CONTAINERS[hint]}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return schema_of_values([member.value for member in hint])
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return schema_of_values(list(arguments))
    if origin is typing.Union or type(hint).__name__ == "UnionType":
        return schema_of_union(arguments)
    if origin in (list, tuple, dict):
        return schema_of_container(origin, arguments)
    raise TypeError(
        "the type %s has no JSON form: use str, int, float, bool, list, dict, Literal, an Enum, or a Union of these" % (hint,)
    )


def schema_of_container(origin, arguments):
    if origin is list:
        return {"type": "array", "items": schema_of_type(arguments[0])} if arguments else {"type": "array"}
    if origin is tuple:
        if ... in arguments:
            raise TypeError("a tuple of any length has no JSON form: use list")
        return {"type": "array", "prefixItems": [schema_of_type(one) for one in arguments]}
    schema = {"type": "object"}
    if len(arguments) == 2:
        schema["additionalProperties"] = schema_of_type(arguments[1])
    return schema


def schema_of_union(arguments):
    schemas = [schema_of_type(one) for one in arguments if one is not type(None)]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(set(one) == {"type"} and isinstance(one["type"], str) for one in schemas):
        names = sorted({one["type"] for one in schemas})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": schemas}
    if type(None) in arguments:
        schema["nullable"] = True
    return schema


def schema_of_values(values):
    types = []
    for value in values:
        if type(value) not in JSON_TYPES:
            raise TypeError("the choice %r has no JSON form" % (value,))
        if JSON_TYPES[type(value)] not in types:
            types.append(JSON_TYPES[type(value)])
    if not types:
        raise TypeError("it has no choices")
    return {"type": types[0] if len(types) == 1 else types, "enum": values}
