//! The memory budget of one rendering: limits the bytes that it may allocate and read.
//!
//! Fuel counts instructions, but a single instruction can double a text or compare a list with itself a million
//! times. So every operation that allocates charges the size first, and every operation that only reads charges
//! a fraction of it.

use std::cell::Cell;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

thread_local! {
    /// (remaining, total) bytes of the current rendering; unlimited outside of [`with_budget`].
    static BUDGET: Cell<(u64, u64)> = const { Cell::new((u64::MAX, u64::MAX)) };
}

/// Memory of a value in a list, in bytes, including the allocator's overhead.
pub const ITEM_BYTES: u64 = 64;
/// Reading this many bytes costs as much as allocating one.
const READ_BYTES_PER_CHARGED: u64 = 64;
/// Cost of visiting one value, in bytes read.
const VISIT_BYTES: u64 = 16;
/// Maximum nesting depth: writing, comparing or dropping deeper values would overflow the stack.
const MAX_DEPTH: u64 = 150;
/// Maximum length of a `float` written without an exponent, in bytes.
const FLOAT_BYTES: u64 = 340;
/// Maximum growth of a character in a text within a list, which may be written as `\u{10ffff}`.
pub const MAX_ESCAPE_BYTES: u64 = 6;

/// Runs `work` with a budget of `bytes` bytes.
pub fn with_budget<T>(bytes: u64, work: impl FnOnce() -> T) -> T {
    let before = BUDGET.replace((bytes, bytes));
    let result = work();
    BUDGET.set(before);
    result
}

/// Charges `bytes` to the current budget, before they are allocated.
pub fn charge(bytes: u64) -> Result<(), Error> {
    let (left, all) = BUDGET.get();
    BUDGET.set((left.saturating_sub(bytes), all));
    if bytes > left {
        let text = format!("the template creates more than {} MiB of text", all >> 20);
        return Err(Error::new(ErrorKind::InvalidOperation, text));
    }
    Ok(())
}

/// Charges reading `bytes` bytes once.
pub fn charge_read(bytes: u64) -> Result<(), Error> {
    charge(bytes / READ_BYTES_PER_CHARGED)
}

/// The size of a value including nested values, each counted as often as it appears.
#[derive(Clone, Copy, Debug, Default)]
pub struct Size {
    pub nodes: u64,
    /// Bytes of all texts.
    pub bytes: u64,
    /// Digits of all numbers when written out.
    pub digits: u64,
    pub depth: u64,
}

impl Size {
    /// Maximum length of the written value, with `between` bytes between two items.
    pub fn written(&self, between: u64) -> u64 {
        let Size { nodes, bytes, digits, depth: _ } = *self;
        bytes.saturating_mul(MAX_ESCAPE_BYTES).saturating_add(digits).saturating_add(nodes.saturating_mul(between))
    }
}

/// Measures a value by visiting all of it.
pub fn measure(value: &Value) -> Result<Size, Error> {
    let mut size = Size::default();
    walk(value, 0, &mut size)?;
    Ok(size)
}

/// Checks the depth of a value that is about to be nested in another one, and charges visiting it.
pub fn check_nesting(value: &Value) -> Result<(), Error> {
    walk(value, 1, &mut Size::default())
}

fn walk(value: &Value, depth: u64, size: &mut Size) -> Result<(), Error> {
    charge(VISIT_BYTES)?;
    size.nodes += 1;
    size.depth = size.depth.max(depth);
    match value.kind() {
        ValueKind::String => {
            let bytes = value.as_str().unwrap_or_default().len() as u64;
            size.bytes += bytes;
            charge_read(bytes)?;
        }
        ValueKind::Number => size.digits += if value.is_integer() { 40 } else { FLOAT_BYTES },
        kind @ (ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) => {
            if depth > MAX_DEPTH {
                return Err(Error::new(ErrorKind::InvalidOperation, "a value is nested too deeply"));
            }
            // These two objects can change after they were measured, and could be made to contain themselves.
            let name = value.as_object().map_or("", |object| object.type_name());
            if depth > 0 && (name.ends_with("::Namespace") || name.ends_with("::Loop")) {
                let text = "a namespace or loop object cannot be stored in another value";
                return Err(Error::new(ErrorKind::InvalidOperation, text));
            }
            for item in value.try_iter()? {
                walk(&item, depth + 1, size)?;
                if kind == ValueKind::Map {
                    walk(&value.get_item(&item)?, depth + 1, size)?;
                }
            }
        }
        _ => size.bytes += 16,
    }
    Ok(())
}

/// Maximum length of a value as text, in bytes. Charges visiting the value if necessary.
pub fn text_bytes(value: &Value) -> Result<u64, Error> {
    match value.as_str() {
        Some(text) => Ok(text.len() as u64),
        None => Ok(measure(value)?.written(16)),
    }
}

/// Materializes a lazy value as a list.
///
/// A lazy list is computed again at each use: such lists could nest without limit and have any length.
pub fn materialize(value: Value) -> Result<Value, Error> {
    if value.kind() != ValueKind::Iterable {
        return Ok(value);
    }
    let mut items = Vec::new();
    for item in value.try_iter()?.checked() {
        charge(ITEM_BYTES)?;
        items.push(item?);
    }
    Ok(Value::from(items))
}
