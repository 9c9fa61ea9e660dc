//! What one rendering may make and look at, in bytes.
//!
//! Fuel counts instructions, but one instruction can double a text or compare a list with itself a million times over. So
//! whatever makes something draws its size here first, and whatever only looks draws a part of it.

use std::cell::Cell;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

thread_local! {
    /// What is left, and of how much. Nobody is counted outside of [`within`].
    static BUDGET: Cell<(u64, u64)> = const { Cell::new((u64::MAX, u64::MAX)) };
}

/// A value in a list, with what the allocator adds.
pub const ITEM_BYTES: u64 = 64;
/// Looking at so many bytes is as dear as making one.
const LOOK: u64 = 64;
/// Looking at one value.
const NODE: u64 = 16;
/// Values nested deeper would overflow the stack when they are written, compared or dropped.
const MAX_DEPTH: u64 = 150;
/// A `float` written out without an exponent.
const FLOAT_BYTES: u64 = 340;
/// A character within a text within a list may be written as `\u{10ffff}`.
pub const ESCAPED: u64 = 6;

/// Runs `work` with so many bytes to make.
pub fn within<T>(bytes: u64, work: impl FnOnce() -> T) -> T {
    let before = BUDGET.replace((bytes, bytes));
    let result = work();
    BUDGET.set(before);
    result
}

/// So many bytes are about to be made.
pub fn draw(bytes: u64) -> Result<(), Error> {
    let (left, all) = BUDGET.get();
    BUDGET.set((left.saturating_sub(bytes), all));
    if bytes > left {
        let text = format!("the template makes more than {} MiB of text", all >> 20);
        return Err(Error::new(ErrorKind::InvalidOperation, text));
    }
    Ok(())
}

/// So many bytes are about to be looked at, once.
pub fn look(bytes: u64) -> Result<(), Error> {
    draw(bytes / LOOK)
}

/// What is in a value, its own values included, each as often as it appears.
#[derive(Clone, Copy, Debug, Default)]
pub struct Size {
    pub nodes: u64,
    /// Of the texts.
    pub bytes: u64,
    /// Of the numbers, written out.
    pub digits: u64,
    pub depth: u64,
}

impl Size {
    /// Most that it can be when it is written out, `between` bytes between two values.
    pub fn written(&self, between: u64) -> u64 {
        let Size { nodes, bytes, digits, depth: _ } = *self;
        bytes.saturating_mul(ESCAPED).saturating_add(digits).saturating_add(nodes.saturating_mul(between))
    }
}

/// Looks through a value.
pub fn size(value: &Value) -> Result<Size, Error> {
    let mut size = Size::default();
    walk(value, 0, &mut size)?;
    Ok(size)
}

/// Looks through a value that is about to be within another one.
pub fn nested(value: &Value) -> Result<(), Error> {
    walk(value, 1, &mut Size::default())
}

fn walk(value: &Value, depth: u64, size: &mut Size) -> Result<(), Error> {
    draw(NODE)?;
    size.nodes += 1;
    size.depth = size.depth.max(depth);
    match value.kind() {
        ValueKind::String => {
            let bytes = value.as_str().unwrap_or_default().len() as u64;
            size.bytes += bytes;
            look(bytes)?;
        }
        ValueKind::Number => size.digits += if value.is_integer() { 40 } else { FLOAT_BYTES },
        kind @ (ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) => {
            if depth > MAX_DEPTH {
                return Err(Error::new(ErrorKind::InvalidOperation, "a value is nested too deeply"));
            }
            // These two change after they were looked at: one could be made to contain itself.
            let name = value.as_object().map_or("", |object| object.type_name());
            if depth > 0 && (name.ends_with("::Namespace") || name.ends_with("::Loop")) {
                let text = "a namespace or a loop cannot be within another value";
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

/// Bytes of a value as text, at most. It may still have to be looked through.
pub fn text(value: &Value) -> Result<u64, Error> {
    match value.as_str() {
        Some(text) => Ok(text.len() as u64),
        None => Ok(size(value)?.written(16)),
    }
}

/// Makes a list of what would be computed again each time it is looked at, or only when it is.
///
/// Lists that are not there could be in one another without any end, and be as long as they like.
pub fn whole(value: Value) -> Result<Value, Error> {
    if value.kind() != ValueKind::Iterable {
        return Ok(value);
    }
    let mut items = Vec::new();
    for item in value.try_iter()?.checked() {
        draw(ITEM_BYTES)?;
        items.push(item?);
    }
    Ok(Value::from(items))
}
