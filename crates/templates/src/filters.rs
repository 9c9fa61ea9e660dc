//! The filters, tests, functions and methods that templates may use: those of Jinja, each charged to the memory
//! budget before it runs.

use std::borrow::Cow;

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value, filters, functions, tests};
use minijinja_contrib::pycompat;

use super::budget::{self, ITEM_BYTES, MAX_ESCAPE_BYTES, charge, charge_read};
use super::methods;
use super::nulls::{refuse_null, refuse_null_in, refuse_null_items};
use super::operators::{self, elements, scan};

/// How the cost of a filter or method is computed from its arguments. The first argument is the value before the `|` or the `.`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cost {
    /// The call reads no more than the length of the first argument.
    ReadLength,
    /// The call reads all of its arguments.
    ReadAll,
    /// The call creates a text about as long as its arguments.
    Text,
    /// The call creates a text in which every character may be escaped.
    Escaped,
    /// The call creates a list as long as the first argument.
    List,
    /// The call compares all items and creates a list or returns an item; it may copy every text.
    Order,
    /// The call adds up all items of a list.
    Sum,
    Join,
    Replace,
    /// The first argument is a format string with fields such as `%d`.
    Printf,
    /// The first argument is a format string with fields such as `{:d}`.
    Format,
    Indent,
    /// The call creates a list of lists, filled up to a given length.
    Fill,
    Json,
    Split,
    /// The call searches the second argument for every character of the first.
    Strip,
}

/// Maximum length in characters of an error message that a template raises.
const MAX_MESSAGE_CHARS: usize = 2000;
/// Maximum length in bytes of a number that a format string writes, if its field has no width.
const NUMBER_BYTES: u64 = 512;

/// Creates an environment for templates in which every operation is charged to the memory budget. `formatter` must charge for the
/// text that it writes.
pub fn environment(fuel: u64) -> Environment<'static> {
    let mut environment = Environment::empty();
    environment.set_fuel(Some(fuel));
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(method);
    operators::install(&mut environment);
    for (name, cost, filter) in charged_filters() {
        environment.add_filter(name, charged(cost, filter));
    }
    for (name, cost, test) in charged_tests() {
        environment.add_test(name, charged(cost, test));
    }
    add_uncharged_tests(&mut environment);
    // `range` needs no charge: minijinja limits it to 100,000 numbers, and each number costs an instruction.
    environment.add_function("range", functions::range);
    for (name, function) in
        [("dict", Value::from_function(functions::dict)), ("namespace", Value::from_function(functions::namespace))]
    {
        environment.add_function(name, move |state: &mut State, args: Rest<ValueOrKwargs>| -> Result<Value, Error> {
            let args = args.into_values();
            for value in flatten_args(&args)? {
                charge(elements(&value).saturating_mul(2 * ITEM_BYTES))?;
                budget::check_nesting(&value)?;
            }
            function.call(state, &args)
        });
    }
    environment
}

/// Makes an environment refuse null as a part of a text, which Jinja writes as `None`: for templates whose text is stored as
/// data. Chat templates must write what Jinja writes.
pub fn refuse_nulls(environment: &mut Environment<'static>) {
    operators::refuse_nulls(environment);
    environment.set_unknown_method_callback(|state, value, name, args| {
        match (value.kind(), name) {
            (ValueKind::String, "format") => refuse_null_in(args)?,
            (ValueKind::String, "join") => args.iter().try_for_each(refuse_null_items)?,
            _ => {}
        }
        method(state, value, name, args)
    });
    for (name, cost, filter) in charged_filters() {
        let check: Check = match cost {
            Cost::Text | Cost::Escaped | Cost::Indent | Cost::Split | Cost::Strip => {
                |args| args.first().map_or(Ok(()), refuse_null)
            }
            Cost::Replace | Cost::Printf | Cost::Format => refuse_null_in,
            Cost::Join => |args| args.first().map_or(Ok(()), refuse_null_items),
            _ => continue,
        };
        environment.add_filter(name, checked(check, cost, filter));
    }
}

/// Implements `raise_exception`: fails with the template's message.
pub fn raise(message: &Value) -> Result<Value, Error> {
    charge(budget::text_bytes(message)?)?;
    let text: String = message.to_string().chars().take(MAX_MESSAGE_CHARS).collect();
    Err(Error::new(ErrorKind::InvalidOperation, text))
}

fn charged(
    cost: Cost,
    function: Value,
) -> impl Fn(&mut State<'_, '_>, Rest<ValueOrKwargs>) -> Result<Value, Error> + Send + Sync + 'static {
    checked(|_| Ok(()), cost, function)
}

/// A check of a call's arguments.
type Check = fn(&[Value]) -> Result<(), Error>;

fn checked(
    check: Check,
    cost: Cost,
    function: Value,
) -> impl Fn(&mut State<'_, '_>, Rest<ValueOrKwargs>) -> Result<Value, Error> + Send + Sync + 'static {
    move |state, args| {
        let args = args.into_values();
        check(&args)?;
        charge_call(state, cost, &args)?;
        checked_result(cost, function.call(state, &args)?)
    }
}

/// The filters that templates may use. Missing are `chain` and `zip`, which create a list only when it is
/// read, `pprint` and `urlencode`.
fn charged_filters() -> Vec<(&'static str, Cost, Value)> {
    let mut all = Vec::new();
    macro_rules! cost {
        ($cost:ident: $($name:literal $function:ident),*) => {
            $(all.push(($name, Cost::$cost, Value::from_function(filters::$function)));)*
        };
    }
    cost!(ReadLength: "length" length, "count" length, "default" default, "d" default, "first" first, "last" last);
    cost!(ReadLength: "abs" abs, "round" round, "int" int, "float" float, "bool" bool, "attr" attr);
    cost!(Text: "safe" safe, "lower" lower, "upper" upper, "title" title, "capitalize" capitalize);
    cost!(Text: "string" string, "reverse" reverse);
    cost!(Escaped: "escape" escape, "e" escape);
    cost!(List: "list" list, "items" items, "map" map, "select" select, "selectattr" selectattr);
    cost!(List: "reject" reject, "rejectattr" rejectattr);
    cost!(Order: "sort" sort, "dictsort" dictsort, "groupby" groupby, "min" min, "max" max, "unique" unique);
    cost!(Sum: "sum" sum);
    cost!(Join: "join" join);
    cost!(Replace: "replace" replace);
    cost!(Printf: "format" format);
    cost!(Indent: "indent" indent);
    cost!(Fill: "batch" batch, "slice" slice);
    cost!(Json: "tojson" tojson);
    cost!(Split: "split" split, "lines" lines);
    cost!(Strip: "trim" trim);
    all
}

/// Jinja's tests that read all of their arguments.
fn charged_tests() -> Vec<(&'static str, Cost, Value)> {
    let mut all = Vec::new();
    macro_rules! cost {
        ($cost:ident: $($name:literal $function:ident),*) => {
            $(all.push(($name, Cost::$cost, Value::from_function(tests::$function)));)*
        };
    }
    cost!(ReadAll: "eq" is_eq, "equalto" is_eq, "==" is_eq, "ne" is_ne, "!=" is_ne, "lt" is_lt, "lessthan" is_lt);
    cost!(ReadAll: "<" is_lt, "le" is_le, "<=" is_le, "gt" is_gt, "greaterthan" is_gt, ">" is_gt, "ge" is_ge);
    cost!(ReadAll: ">=" is_ge, "lower" is_lower, "upper" is_upper);
    cost!(Text: "startingwith" is_startingwith, "endingwith" is_endingwith, "in" is_in);
    all
}

/// Jinja's tests that read nothing but the value itself.
fn add_uncharged_tests(environment: &mut Environment<'static>) {
    environment.add_test("undefined", tests::is_undefined);
    environment.add_test("defined", tests::is_defined);
    environment.add_test("none", tests::is_none);
    environment.add_test("safe", tests::is_safe);
    environment.add_test("escaped", tests::is_safe);
    environment.add_test("boolean", tests::is_boolean);
    environment.add_test("odd", tests::is_odd);
    environment.add_test("even", tests::is_even);
    environment.add_test("divisibleby", tests::is_divisibleby);
    environment.add_test("number", tests::is_number);
    environment.add_test("integer", tests::is_integer);
    environment.add_test("int", tests::is_integer);
    environment.add_test("float", tests::is_float);
    environment.add_test("string", tests::is_string);
    environment.add_test("sequence", tests::is_sequence);
    environment.add_test("iterable", tests::is_iterable);
    environment.add_test("mapping", tests::is_mapping);
    environment.add_test("sameas", tests::is_sameas);
    environment.add_test("true", tests::is_true);
    environment.add_test("false", tests::is_false);
    environment.add_test("filter", tests::is_filter);
    environment.add_test("test", tests::is_test);
}

/// Calls a method of a text, list or map that Python has and minijinja does not.
fn method(state: &mut State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let cost = match (value.kind(), name) {
        (ValueKind::String, "upper" | "lower" | "title" | "capitalize") => Cost::Text,
        (ValueKind::String, "strip" | "lstrip" | "rstrip") => Cost::Strip,
        (ValueKind::String, "replace") => Cost::Replace,
        (ValueKind::String, "split" | "splitlines" | "rsplit" | "partition" | "rpartition") => Cost::Split,
        (ValueKind::String, "removeprefix" | "removesuffix" | "swapcase") => Cost::Text,
        (ValueKind::String, "ljust" | "rjust" | "center" | "zfill") => Cost::Text,
        (ValueKind::String, "format") => Cost::Format,
        (ValueKind::String, "join") => Cost::Join,
        (ValueKind::Map, "keys" | "values" | "items") => Cost::List,
        (ValueKind::Map, "get") => Cost::ReadLength,
        _ => Cost::ReadAll,
    };
    let known = !matches!(value.kind(), ValueKind::Map) || cost != Cost::ReadAll;
    if known {
        let mut all: Vec<Value> = std::iter::once(value).chain(args).cloned().collect();
        if cost == Cost::Join {
            // The method `join` is called on the separator, so the items are its second argument.
            all.reverse();
        }
        charge_call(state, cost, &all)?;
    }
    let own = match value.as_str() {
        Some(text) => methods::of_text(text, name, args)?,
        None => None,
    };
    match own {
        Some(result) => checked_result(cost, result),
        None => checked_result(cost, pycompat::unknown_method_callback(state, value, name, args)?),
    }
}

/// Checks the nesting depth of a filter's or method's result, since some of them put a list into a list.
fn checked_result(cost: Cost, result: Value) -> Result<Value, Error> {
    if matches!(cost, Cost::ReadLength | Cost::ReadAll) || result.as_object().is_none() {
        return Ok(result);
    }
    let result = budget::materialize(result)?;
    budget::measure(&result)?;
    Ok(result)
}

/// Returns the positional arguments of a call, followed by the values of its keyword arguments.
fn flatten_args(args: &[Value]) -> Result<Vec<Value>, Error> {
    let mut all = Vec::with_capacity(args.len());
    for arg in args {
        if arg.is_kwargs() {
            for name in arg.try_iter()? {
                all.push(arg.get_item(&name)?);
            }
        } else {
            all.push(arg.clone());
        }
    }
    Ok(all)
}

#[expect(clippy::too_many_lines, reason = "the function has one formula for each kind of cost")]
fn charge_call(state: &State<'_, '_>, cost: Cost, args: &[Value]) -> Result<(), Error> {
    charge(args.len() as u64)?;
    let args = flatten_args(args)?;
    let Some((first, rest)) = args.split_first() else { return Ok(()) };
    let texts = |values: &[Value]| {
        values.iter().try_fold(0u64, |sum, value| Ok::<_, Error>(sum.saturating_add(budget::text_bytes(value)?)))
    };
    let largest = || rest.iter().filter_map(Value::as_usize).max().unwrap_or_default() as u64;
    let escaping = first.is_safe() || !matches!(state.auto_escape(), AutoEscape::None);
    let escaped = if escaping { MAX_ESCAPE_BYTES } else { 1 };
    let count = elements(first);
    match cost {
        Cost::ReadLength => {
            charge_read(if first.as_str().is_some() { count } else { 0 })?;
            rest.iter().try_for_each(scan)
        }
        Cost::ReadAll => args.iter().try_for_each(scan),
        Cost::Text => charge(texts(&args)?),
        Cost::Escaped => charge(texts(&args)?.saturating_mul(MAX_ESCAPE_BYTES)),
        Cost::List => {
            // Some of these filters turn each item into a pair, so two values per item are charged.
            charge(count.saturating_mul(2 * ITEM_BYTES))?;
            charge_read(count.saturating_mul(texts(rest)?))
        }
        Cost::Order | Cost::Sum => {
            let size = budget::measure(first)?;
            let others = texts(rest)?;
            let times = u64::from(count.max(1).ilog2()) + 1;
            charge(count.saturating_mul(2 * ITEM_BYTES).saturating_add(size.bytes))?;
            charge_read((size.nodes * 4 + size.bytes).saturating_mul(times))?;
            charge_read(count.saturating_mul(others))?;
            // The sum of texts or lists grows with each item; the sum of numbers does not.
            if cost == Cost::Sum && rest.iter().any(|value| value.as_object().is_some()) {
                charge(count.saturating_mul(size.nodes).saturating_mul(ITEM_BYTES))
            } else if cost == Cost::Sum && !rest.is_empty() {
                charge(count.saturating_mul(size.bytes))
            } else {
                Ok(())
            }
        }
        Cost::Join => {
            let between = texts(rest)?;
            let Ok(items) = first.try_iter() else { return Ok(()) };
            for item in items {
                charge(budget::text_bytes(&item)?.saturating_add(between).saturating_mul(escaped))?;
            }
            Ok(())
        }
        Cost::Replace => {
            charge(texts(&args)?)?;
            let [from, to, ..] = rest else { return Ok(()) };
            let matches = string(first)?.matches(string(from)?.as_ref()).count() as u64;
            charge(matches.saturating_mul(budget::text_bytes(to)?).saturating_mul(escaped))
        }
        Cost::Printf | Cost::Format => {
            let format = string(first)?;
            let (fields, widths) = fields(&format, cost == Cost::Format);
            let given = (format.matches('*').count() as u64).saturating_mul(largest());
            // A fill character may have four bytes, and a format string may use the same argument several times.
            let each = texts(rest)?.saturating_mul(escaped).saturating_add(NUMBER_BYTES);
            let all = widths.saturating_add(given).saturating_mul(4).saturating_add(fields.saturating_mul(each));
            charge(all.saturating_add(format.len() as u64))
        }
        Cost::Indent => {
            let lines = string(first)?.matches('\n').count() as u64 + 1;
            // The charge includes the indentation of each line.
            charge(texts(&args)?.saturating_add((lines + 1).saturating_mul(largest())))
        }
        Cost::Fill => charge(count.saturating_add(largest().saturating_mul(2)).saturating_mul(ITEM_BYTES)),
        Cost::Json => {
            let size = budget::measure(first)?;
            charge(size.written(16u64.saturating_add(size.depth.saturating_mul(largest()))))
        }
        Cost::Split => {
            let text = string(first)?;
            let pieces = match rest.first().and_then(Value::as_str) {
                Some(separator) => text.matches(separator).count(),
                None => text.split(char::is_whitespace).count(),
            };
            charge(texts(&args)?.saturating_add((pieces as u64 + 1).saturating_mul(2 * ITEM_BYTES)))
        }
        Cost::Strip => {
            charge(texts(&args)?)?;
            charge_read(count.saturating_mul(texts(rest)?))
        }
    }
}

/// Converts a template value to text.
fn string(value: &Value) -> Result<Cow<'_, str>, Error> {
    if let Some(text) = value.as_str() {
        return Ok(Cow::Borrowed(text));
    }
    charge(budget::text_bytes(value)?)?;
    Ok(Cow::Owned(value.to_string()))
}

/// Returns the number of fields in a format string, and the sum of all numbers (widths and precisions) in these fields.
fn fields(format: &str, braces: bool) -> (u64, u64) {
    let (mut fields, mut sum) = (0, 0u64);
    for part in format.split(if braces { '{' } else { '%' }).skip(1) {
        let field = if braces {
            part.split('}').next().unwrap_or_default()
        } else {
            let named = part.strip_prefix('(').and_then(|part| part.split_once(')'));
            let part = named.map_or(part, |(_, part)| part);
            part.split(|c: char| c.is_ascii_alphabetic() || c == '%').next().unwrap_or_default()
        };
        let numbers = field.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
        fields += 1;
        sum = numbers.fold(sum, |sum, digits| sum.saturating_add(digits.parse().unwrap_or(u64::MAX)));
    }
    (fields, sum)
}
