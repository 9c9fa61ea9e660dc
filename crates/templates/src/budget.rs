//! The memory budget of one rendering of a template: limits the bytes that the template may allocate and read.
//!
//! Fuel counts instructions, but a single instruction can double a text or compare a list with itself a million
//! times. So every operation that allocates charges the size first, and every operation that only reads charges
//! a fraction of it.

use std::cell::Cell;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

thread_local! {
    /// Remaining and total bytes of the current rendering's budget; unlimited outside of [`with_budget`].
    static BUDGET: Cell<(u64, u64)> = const { Cell::new((u64::MAX, u64::MAX)) };
}

/// Memory in bytes of a template value in a list, including the allocator's overhead.
pub const ITEM_BYTES: u64 = 64;
/// Number of bytes that a template may read at the cost of allocating one.
const READ_BYTES_PER_CHARGED: u64 = 64;
/// Cost of visiting one value of a list or map, in bytes read.
const VISIT_BYTES: u64 = 16;
/// Maximum nesting depth of a template's values: writing, comparing or dropping deeper values would overflow the stack.
const MAX_DEPTH: u64 = 150;
/// Maximum length in bytes of a floating-point number written without an exponent.
const FLOAT_BYTES: u64 = 340;
/// Maximum growth of a byte when a list with texts is written as text: a character may become an escape such as `\u{10ffff}`.
pub const MAX_ESCAPE_BYTES: u64 = 6;

/// Runs `work`, such as the rendering of a template, with a memory budget of `bytes` bytes.
pub fn with_budget<T>(bytes: u64, work: impl FnOnce() -> T) -> T {
    let before = BUDGET.replace((bytes, bytes));
    let result = work();
    BUDGET.set(before);
    result
}

/// Charges `bytes` to the current memory budget, before they are allocated.
pub fn charge(bytes: u64) -> Result<(), Error> {
    let (left, all) = BUDGET.get();
    BUDGET.set((left.saturating_sub(bytes), all));
    if bytes > left {
        let text = format!("the template creates more than {} MiB of text", all >> 20);
        return Err(Error::new(ErrorKind::InvalidOperation, text));
    }
    Ok(())
}

/// Charges the memory budget for reading `bytes` bytes once.
pub fn charge_read(bytes: u64) -> Result<(), Error> {
    charge(bytes / READ_BYTES_PER_CHARGED)
}

/// The size of a template value including nested values, each counted as often as it appears.
#[derive(Clone, Copy, Debug, Default)]
pub struct Size {
    pub nodes: u64,
    /// Total bytes of all texts in the value.
    pub bytes: u64,
    /// Total digits of all numbers in the value when written as text.
    pub digits: u64,
    pub depth: u64,
}

impl Size {
    /// Returns the maximum length of the value when written as text, with `between` bytes between two items.
    pub fn written(&self, between: u64) -> u64 {
        let Size { nodes, bytes, digits, depth: _ } = *self;
        bytes.saturating_mul(MAX_ESCAPE_BYTES).saturating_add(digits).saturating_add(nodes.saturating_mul(between))
    }
}

/// Measures a template value by visiting all nested values.
pub fn measure(value: &Value) -> Result<Size, Error> {
    let mut size = Size::default();
    walk(value, 0, &mut size)?;
    Ok(size)
}

/// Checks the depth of a template value that is about to be nested in another one, and charges for visiting it.
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
            // Jinja's `namespace` and `loop` objects can change after they were measured, and could be made to contain themselves.
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

/// Returns the maximum length in bytes of a template value as text. Charges for visiting the value if necessary.
pub fn text_bytes(value: &Value) -> Result<u64, Error> {
    match value.as_str() {
        Some(text) => Ok(text.len() as u64),
        None => Ok(measure(value)?.written(16)),
    }
}

/// Converts a lazy value, such as the result of `map`, to a list.
///
/// A lazy list is computed again at each use, so such lists could nest without limit and have any length.
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
