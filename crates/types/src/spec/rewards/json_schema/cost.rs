//! Computes an upper bound on the steps that the validator takes to check a value against a schema. It walks as the validator does,
//! but visits each pair of subschema and part of the value only once, however many paths lead there, and multiplies.

use std::collections::HashMap;

use serde_json::Value;

use super::graph::{Graph, Node};

/// Maximum number of steps per value, about a second of work.
pub(super) const MAX_STEPS: u64 = 1_000_000;
/// Maximum nesting depth of subschemas and parts of the value.
pub(super) const MAX_DEPTH: usize = 1_000;
/// Number of steps that a metaschema of JSON Schema takes for each part of a value.
const METASCHEMA_STEPS: u64 = 300;

/// Why a value is not checked against a schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TooCostly {
    /// The validation would take more than [`MAX_STEPS`] steps.
    #[error(
        "the schema takes more than {MAX_STEPS} steps on this value: reference each definition once, or use a simpler schema"
    )]
    Steps,
    /// The schema and the value nest more than [`MAX_DEPTH`] deep.
    #[error("the schema and this value nest {MAX_DEPTH} deep: use a simpler schema")]
    Depth,
    /// The validation would never end.
    #[error("the schema's references lead in a circle on this value: use a simpler schema")]
    Circle,
    /// The operating system could not start another thread.
    #[error("no thread can be started to validate this value against its schema")]
    Thread,
}

/// Part of a value, or the name of a property.
#[derive(Clone, Copy)]
enum Part<'v> {
    Value(&'v Value),
    Name { longest_bytes: usize },
}

impl Part<'_> {
    fn key(self) -> usize {
        match self {
            // Values are aligned, so the addresses of values are even numbers, and odd ones are free for property names.
            Part::Value(value) => std::ptr::from_ref(value).addr(),
            Part::Name { longest_bytes } => longest_bytes * 2 + 1,
        }
    }
}

/// Returns the depth that the validator will reach if it takes no more than [`MAX_STEPS`].
pub(super) fn count(graph: &Graph, value: &Value) -> Result<usize, TooCostly> {
    let mut counter = Counter { graph, known: HashMap::new(), deepest: 0, left: MAX_STEPS };
    counter.visit(0, Part::Value(value), 1)?;
    Ok(counter.deepest)
}

struct Counter<'g> {
    graph: &'g Graph,
    /// Steps and height by subschema and part of the value; `None` while they are being counted.
    known: HashMap<(usize, usize), Option<(u64, usize)>>,
    deepest: usize,
    /// Remaining steps of the count itself, whose work is limited too.
    left: u64,
}

impl Counter<'_> {
    /// Returns the number of steps and the nesting height of a subschema on a part of the value.
    fn visit(&mut self, number: usize, part: Part<'_>, depth: usize) -> Result<(u64, usize), TooCostly> {
        let key = (number, part.key());
        self.left = self.left.checked_sub(1).ok_or(TooCostly::Steps)?;
        let (steps, height) = match self.known.get(&key) {
            Some(Some(known)) => *known,
            Some(None) => return Err(TooCostly::Circle),
            None if depth > MAX_DEPTH => return Err(TooCostly::Depth),
            None => {
                self.known.insert(key, None);
                let counted = self.count(number, part, depth)?;
                self.known.insert(key, Some(counted));
                counted
            }
        };
        self.deepest = self.deepest.max(depth + height);
        if self.deepest > MAX_DEPTH {
            return Err(TooCostly::Depth);
        }
        if steps > MAX_STEPS { Err(TooCostly::Steps) } else { Ok((steps, height)) }
    }

    fn count(&mut self, number: usize, part: Part<'_>, depth: usize) -> Result<(u64, usize), TooCostly> {
        let graph = self.graph;
        let node = &graph.nodes[number];
        let length = match part {
            Part::Value(Value::String(text)) => text.len() as u64,
            Part::Name { longest_bytes } => longest_bytes as u64,
            Part::Value(_) => 0,
        };
        let own = 1 + node.weight + length.saturating_mul(node.per_kib) / 1024;
        self.left = self.left.checked_sub(own).ok_or(TooCostly::Steps)?;
        let mut sum = Sum { steps: own, height: 0 };
        if let Part::Value(value) = part
            && !examines_further(&node.types, &node.fixed, value)
        {
            return Ok((sum.steps, 0));
        }
        for target in &node.same {
            sum.add(self.visit(*target, part, depth + 1)?);
        }
        for group in &node.choices {
            let mut most = Sum::default();
            for target in group {
                most.or(self.visit(*target, part, depth + 1)?);
            }
            sum.add((most.steps, most.height));
        }
        if node.metaschemas > 0
            && let Part::Value(value) = part
        {
            let size = parts(value);
            self.left = self.left.checked_sub(size).ok_or(TooCostly::Steps)?;
            sum.add((node.metaschemas.saturating_mul(METASCHEMA_STEPS).saturating_mul(size), 8 * nesting(value)));
        }
        match part {
            Part::Value(Value::Object(object)) => {
                for (name, target) in &node.dependent {
                    if object.contains_key(name) {
                        sum.add(self.visit(*target, part, depth + 1)?);
                    }
                }
                let noted = if graph.unevaluated { object.len() } else { object.len() / 16 };
                sum.add_steps(noted as u64);
                for (name, inner) in object {
                    let inner = Part::Value(inner);
                    let matching = node.patterns.len() as u64 * (1 + name.len() as u64 * node.per_kib / 1024);
                    sum.add_steps(matching);
                    let mut patterns = Sum::default();
                    for target in &node.patterns {
                        patterns.add(self.visit(*target, inner, depth + 1)?);
                    }
                    if let Some(target) = node.properties.get(name) {
                        sum.add(self.visit(*target, inner, depth + 1)?);
                    } else {
                        // `additionalProperties` and `unevaluatedProperties` apply to properties that no pattern matches.
                        for target in [node.additional, node.unevaluated_properties].into_iter().flatten() {
                            patterns.or(self.visit(target, inner, depth + 1)?);
                        }
                    }
                    sum.add((patterns.steps, patterns.height));
                }
                if let Some(target) = node.names.filter(|_| !object.is_empty()) {
                    let longest_bytes = object.keys().map(String::len).max().unwrap_or(0);
                    let (steps, height) = self.visit(target, Part::Name { longest_bytes }, depth + 1)?;
                    sum.add((steps.saturating_mul(object.len() as u64), height));
                }
            }
            Part::Value(Value::Array(list)) => {
                self.count_items(node, list, depth, &mut sum)?;
            }
            Part::Value(_) | Part::Name { .. } => {}
        }
        Ok((sum.steps, sum.height))
    }

    fn count_items(&mut self, node: &Node, list: &[Value], depth: usize, sum: &mut Sum) -> Result<(), TooCostly> {
        sum.add_steps(if self.graph.unevaluated { list.len() as u64 } else { 0 });
        if node.unique {
            let size = list.iter().map(parts).fold(0, u64::saturating_add);
            self.left = self.left.checked_sub(size).ok_or(TooCostly::Steps)?;
            // `uniqueItems` compares the items of short lists pair by pair.
            sum.add_steps(size.saturating_mul(12));
        }
        for (index, inner) in list.iter().enumerate() {
            let inner = Part::Value(inner);
            let rest = node.prefix.get(index).copied().or(node.items).or(node.unevaluated_items);
            for target in rest.into_iter().chain(node.contains) {
                sum.add(self.visit(target, inner, depth + 1)?);
            }
        }
        Ok(())
    }
}

#[derive(Default)]
struct Sum {
    steps: u64,
    height: usize,
}

impl Sum {
    fn add_steps(&mut self, steps: u64) {
        self.steps = self.steps.saturating_add(steps);
    }

    fn add(&mut self, (steps, height): (u64, usize)) {
        self.steps = self.steps.saturating_add(steps);
        self.height = self.height.max(height + 1);
    }

    fn or(&mut self, (steps, height): (u64, usize)) {
        self.steps = self.steps.max(steps);
        self.height = self.height.max(height + 1);
    }
}

/// Whether the validator examines a value further after `type`, `const` and `enum`. Numbers can be equal even if
/// they are written differently.
fn examines_further(types: &Option<Vec<String>>, fixed: &Option<Vec<Value>>, value: &Value) -> bool {
    let name = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let scalar = matches!(value, Value::Null | Value::Bool(_) | Value::String(_));
    types.as_ref().is_none_or(|types| types.iter().any(|known| known == name))
        && !(scalar && fixed.as_ref().is_some_and(|fixed| !fixed.contains(value)))
}

/// Counts a JSON value and all values nested inside it.
fn parts(value: &Value) -> u64 {
    1 + match value {
        Value::Array(list) => list.iter().map(parts).sum(),
        Value::Object(map) => map.values().map(parts).sum(),
        _ => 0,
    }
}

fn nesting(value: &Value) -> usize {
    1 + match value {
        Value::Array(list) => list.iter().map(nesting).max().unwrap_or(0),
        Value::Object(map) => map.values().map(nesting).max().unwrap_or(0),
        _ => 0,
    }
}
