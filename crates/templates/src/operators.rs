//! Checks of the memory budget that run between a template's compiled instructions. Each check is a filter with a name that
//! no template can write.

use minijinja::machinery::Instruction;
use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, Value};

use super::budget::{self, ITEM_BYTES, charge, charge_read};
use super::nulls::refuse_null_in;

type BudgetCheck = fn(&[Value]) -> Result<(), Error>;

/// The budget checks by filter name. Each check reads the values on top of the stack and leaves them there.
const BUDGET_CHECKS: [(&str, BudgetCheck); 9] = [
    ("=add", add),
    ("=mul", mul),
    ("=concat", concat),
    ("=slice", slice),
    ("=item", item),
    ("=in", contains),
    ("=set", set),
    ("=nested", nested),
    ("=changed", changed),
];

/// Registers the filters that `with_checks` inserts between the instructions.
pub fn install(environment: &mut Environment<'static>) {
    for (name, check) in BUDGET_CHECKS {
        environment.add_filter(name, move |values: Rest<Value>| -> Result<Value, Error> {
            check(&values)?;
            // The instruction `UnpackList` after the check pushes the values back onto the stack.
            Ok(values.0.into_iter().rev().collect())
        });
    }
    environment.add_filter("=read", |value: Value| -> Result<Value, Error> {
        scan(&value)?;
        Ok(value)
    });
    environment.add_filter("=each", |value: Value| -> Result<Value, Error> {
        charge_read(elements(&value).saturating_mul(ITEM_BYTES))?;
        Ok(value)
    });
    environment.add_filter("=count", |value: Value| -> Result<Value, Error> {
        charge(value.as_usize().unwrap_or_default() as u64)?;
        Ok(value)
    });
    environment.add_filter("=built", |value: ValueOrKwargs| -> Result<Value, Error> {
        charge(elements(&value).saturating_mul(ITEM_BYTES))?;
        budget::measure(&value)?;
        Ok(value.into_value())
    });
    environment.add_filter("=whole", budget::materialize);
}

/// Replaces the check of `~` by one that also refuses null.
pub(super) fn refuse_nulls(environment: &mut Environment<'static>) {
    environment.add_filter("=concat", |values: Rest<Value>| -> Result<Value, Error> {
        refuse_null_in(&values)?;
        concat(&values)?;
        Ok(values.0.into_iter().rev().collect())
    });
}

/// Returns a compiled instruction with the budget checks before and after it. `top` is the value on top of the stack, if known.
pub fn with_checks<'a>(instruction: &Instruction<'a>, top: Option<&Value>) -> Result<Vec<Instruction<'a>>, Error> {
    let refused = |why: &'static str| Err(Error::new(ErrorKind::SyntaxError, why));
    let same = instruction.clone();
    // minijinja caches filters by id; no other filter uses the id `!0`.
    let one = |name| Instruction::ApplyFilter(name, Some(1), !0);
    let about =
        |name, count: u16| [Instruction::ApplyFilter(name, Some(count), !0), Instruction::UnpackList(count.into())];
    Ok(match instruction {
        // Literal text is written by `Emit`, whose formatter charges for it; `EmitRaw` would not charge.
        Instruction::EmitRaw(text) => vec![Instruction::LoadConst(Value::from(*text)), Instruction::Emit],
        // Adding to a number needs no check: the other operand must be a number too.
        Instruction::Add if top.is_some_and(Value::is_number) => vec![same],
        Instruction::Add => [about("=add", 2).to_vec(), vec![same, one("=whole")]].concat(),
        Instruction::Mul => [about("=mul", 2).to_vec(), vec![same, one("=whole")]].concat(),
        Instruction::StringConcat => [about("=concat", 2).to_vec(), vec![same]].concat(),
        Instruction::Slice => [about("=slice", 4).to_vec(), vec![same, one("=whole")]].concat(),
        Instruction::GetItem if top.is_some_and(|top| top.as_str().is_some()) => vec![same],
        Instruction::GetItem => [about("=item", 2).to_vec(), vec![same]].concat(),
        Instruction::SetAttr(_) => [about("=set", 2).to_vec(), vec![same]].concat(),
        Instruction::Eq | Instruction::Ne | Instruction::Gt | Instruction::Gte | Instruction::Lt | Instruction::Lte
            if top.is_some_and(|top| top.as_object().is_none()) =>
        {
            vec![same]
        }
        Instruction::Eq | Instruction::Ne | Instruction::Gt | Instruction::Gte | Instruction::Lt | Instruction::Lte => {
            vec![one("=read"), same]
        }
        Instruction::In | Instruction::CompareAndPreserve(_) => [about("=in", 2).to_vec(), vec![same]].concat(),
        Instruction::BuildMap(pairs) => match u16::try_from(pairs * 2) {
            Ok(0) => vec![same],
            Ok(count) => [about("=nested", count).to_vec(), vec![same]].concat(),
            Err(_) => return refused("a map literal has too many entries"),
        },
        Instruction::BuildList(_) | Instruction::BuildTuple(_) | Instruction::MergeKwargs(_) => {
            vec![same, one("=built")]
        }
        Instruction::UnpackLists(_) => vec![same, one("=count")],
        Instruction::PushLoop(_) => vec![one("=each"), same],
        Instruction::CallMethod("changed", Some(count)) => [about("=changed", *count).to_vec(), vec![same]].concat(),
        Instruction::CallMethod("changed", None) => return refused("loop.changed() does not accept *arguments"),
        Instruction::Include(_) | Instruction::LoadBlocks => {
            return refused("a template cannot import, extend or include another one");
        }
        _ => vec![same],
    })
}

/// Returns the number of values in a list or map, or of bytes in a text.
pub fn elements(value: &Value) -> u64 {
    match value.as_str() {
        Some(text) => text.len() as u64,
        None => value.len().unwrap_or_default() as u64,
    }
}

/// Charges for visiting all nested values, which is the most that a comparison does.
pub fn scan(value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => charge_read(text.len() as u64),
        None if value.as_object().is_some() => budget::measure(value).map(|_| ()),
        None => Ok(()),
    }
}

/// Checks an addition. If the sum is a lazy list, a later check converts it to a list.
fn add(values: &[Value]) -> Result<(), Error> {
    if values.iter().any(Value::is_tuple) {
        return values.iter().try_for_each(|value| charge(elements(value).saturating_mul(ITEM_BYTES)));
    }
    values.iter().try_for_each(|value| charge(value.as_str().unwrap_or_default().len() as u64))
}

fn mul(values: &[Value]) -> Result<(), Error> {
    let [left, right] = values else { return Ok(()) };
    for (many, times) in [(left, right), (right, left)] {
        let times = times.as_usize().unwrap_or_default() as u64;
        if let Some(text) = many.as_str() {
            charge(times.saturating_mul(text.len() as u64))?;
        } else if many.as_object().is_some() {
            charge(elements(many).saturating_mul(ITEM_BYTES).saturating_mul(times))?;
        }
    }
    Ok(())
}

fn concat(values: &[Value]) -> Result<(), Error> {
    values.iter().try_for_each(|value| charge(budget::text_bytes(value)?))
}

fn slice(values: &[Value]) -> Result<(), Error> {
    let Some(value) = values.first() else { return Ok(()) };
    match value.as_str() {
        Some(text) => charge(text.len() as u64 / 8),
        None => charge_read(elements(value).saturating_mul(ITEM_BYTES)),
    }
}

fn item(values: &[Value]) -> Result<(), Error> {
    let [value, key] = values else { return Ok(()) };
    scan(key)?;
    if value.kind() == ValueKind::Seq || value.kind() == ValueKind::Map {
        return Ok(());
    }
    charge_read(elements(value).saturating_mul(8))
}

fn contains(values: &[Value]) -> Result<(), Error> {
    let [value, container] = values else { return Ok(()) };
    scan(container)?;
    scan(value)?;
    // If the container of an `in` test is a text, a value of another type is converted to text first.
    if container.as_str().is_some() && value.as_str().is_none() { charge(budget::text_bytes(value)?) } else { Ok(()) }
}

fn set(values: &[Value]) -> Result<(), Error> {
    values.first().map_or(Ok(()), budget::check_nesting)
}

fn nested(values: &[Value]) -> Result<(), Error> {
    charge((values.len() as u64).saturating_mul(ITEM_BYTES))?;
    values.iter().try_for_each(budget::check_nesting)
}

/// Checks `loop.changed(…)`, whose arguments the loop object keeps.
fn changed(values: &[Value]) -> Result<(), Error> {
    values.iter().skip(1).try_for_each(budget::check_nesting)
}
