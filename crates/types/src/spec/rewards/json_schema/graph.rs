//! Records which subschemas of a JSON Schema apply which others: on the same value (`$ref`, `allOf`, `not`, …), or on its parts
//! (`properties`, `items`, …). References are resolved as the validator resolves them. If the target depends on the path that led
//! there (`$dynamicRef`), every possible target counts.
//!
//! This file is longer than others because the lists of keywords and the walk that reads them must agree.

use std::collections::HashMap;

use regex::bytes::RegexBuilder;
use serde_json::{Map, Value};
use url::Url;

use super::SCHEMA_ADDRESS;

/// Maximum number of subschemas per schema.
const MAX_SUBSCHEMAS: usize = 5_000;
/// Maximum number of paths from one subschema over references and applicators that stay on the same value.
const MAX_PATHS: u64 = 10_000;
/// Maximum number of paths from the whole schema to its subschemas. A recursion counts once.
const MAX_TOTAL_PATHS: u64 = 1_000_000_000;
/// Maximum length of a chain of references and applicators that stay on the same value.
const MAX_CHAIN: usize = 500;
/// Maximum compiled size of one pattern, and of all patterns together, in bytes.
const PATTERN_BYTES: usize = 1 << 20;
const ALL_PATTERNS_BYTES: usize = 8 << 20;

/// Keywords whose value is one subschema.
const SINGLE: [&str; 11] = [
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contentSchema",
];
/// Keywords whose value is a list of subschemas.
const LISTS: [&str; 4] = ["allOf", "anyOf", "oneOf", "prefixItems"];
/// Keywords whose value maps names to subschemas.
const MAPS: [&str; 6] = ["properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions"];

/// One subschema, with edges to other subschemas (by index).
#[derive(Debug, Default)]
pub(super) struct Node {
    /// Subschemas that this one always applies to the same value.
    pub same: Vec<usize>,
    /// Groups of subschemas, one of which is applied to the same value.
    pub choices: Vec<Vec<usize>>,
    /// Number of references to a metaschema of JSON Schema itself.
    pub metaschemas: u64,
    /// Subschemas that are applied to the same object if the object has the property.
    pub dependent: Vec<(String, usize)>,
    pub properties: HashMap<String, usize>,
    pub patterns: Vec<usize>,
    pub additional: Option<usize>,
    pub unevaluated_properties: Option<usize>,
    pub names: Option<usize>,
    pub prefix: Vec<usize>,
    /// The subschema of `items`, or of `additionalItems` after a list of items.
    pub items: Option<usize>,
    pub unevaluated_items: Option<usize>,
    pub contains: Option<usize>,
    pub unique: bool,
    /// The value of `type`, if validation ends here for values of other types; `integer` is stored as `number`.
    pub types: Option<Vec<String>>,
    /// The values of `const` or `enum`. Validation ends here for texts, booleans and null that are not among them.
    pub fixed: Option<Vec<Value>>,
    /// Number of steps that the subschema takes by itself.
    pub weight: u64,
    /// Number of steps per KiB of text.
    pub per_kib: u64,
}

impl Node {
    /// Adds a group of subschemas, one of which is applied to the same value.
    fn push_choice(&mut self, mut group: Vec<usize>) {
        group.sort_unstable();
        group.dedup();
        match group.as_slice() {
            [one] => self.same.push(*one),
            _ => self.choices.push(group),
        }
    }

    /// Returns the subschemas that are applied to the same value, by any keyword.
    fn in_place(&self) -> impl Iterator<Item = usize> {
        self.same.iter().copied().chain(self.dependent.iter().map(|(_, node)| *node))
    }

    /// Returns every subschema that this subschema may apply.
    fn all(&self) -> impl Iterator<Item = usize> {
        let single = [
            self.additional,
            self.unevaluated_properties,
            self.names,
            self.items,
            self.unevaluated_items,
            self.contains,
        ];
        let choices = self.choices.iter().flatten();
        let parts = self.properties.values().chain(&self.patterns).chain(&self.prefix).chain(choices).copied();
        self.in_place().chain(parts).chain(single.into_iter().flatten())
    }
}

/// All subschemas; the first is the whole schema.
#[derive(Debug)]
pub(super) struct Graph {
    pub nodes: Vec<Node>,
    /// Whether `unevaluatedItems` or `unevaluatedProperties` appears anywhere. The validator then records every part of a value.
    pub unevaluated: bool,
}

impl Graph {
    /// Reads a schema and checks its limits.
    ///
    /// # Errors
    /// Fails if the schema is too large, or if its references branch too often or form a cycle.
    pub fn new(schema: &Value) -> Result<Self, String> {
        let mut builder = Builder::new(schema);
        builder.find(String::new(), schema)?;
        let dynamic = builder.dynamic.clone();
        let mut nodes = Vec::new();
        // Resolving a reference may find more subschemas below unknown keywords.
        while nodes.len() < builder.found.len() {
            let (pointer, value) = builder.found[nodes.len()].clone();
            nodes.push(builder.node(&pointer, value)?);
        }
        // The nodes before this one have already resolved their dynamic references, so a later anchor would be missed.
        if builder.dynamic != dynamic {
            return Err(
                "a $dynamicAnchor below a keyword that is not known is not followed: put it below $defs".to_owned()
            );
        }
        if builder.to_metaschema && builder.has_dynamic_anchors {
            return Err(
                "a schema that references a metaschema may not have $dynamicAnchor or $recursiveAnchor".to_owned()
            );
        }
        let graph = Self { nodes, unevaluated: builder.unevaluated };
        graph.check(&builder.found)?;
        Ok(graph)
    }

    fn check(&self, found: &[(String, &Value)]) -> Result<(), String> {
        let at = |node: usize| if found[node].0.is_empty() { "its root" } else { found[node].0.as_str() };
        let (components, _) = components(self.nodes.len(), |node| self.nodes[node].in_place().collect());
        let (mut paths, mut chain) = (vec![1_u64; self.nodes.len()], vec![1_usize; self.nodes.len()]);
        for component in components {
            let node = component[0];
            let targets: Vec<usize> = self.nodes[node].in_place().collect();
            if component.len() > 1 || targets.contains(&node) {
                return Err(format!(
                    "the schema's references at {} lead in a circle: checking a value would never end",
                    at(node)
                ));
            }
            let sum = targets.iter().fold(0_u64, |sum, target| sum.saturating_add(paths[*target]));
            paths[node] = sum.max(1);
            chain[node] = 1 + targets.iter().map(|target| chain[*target]).max().unwrap_or(0);
            if paths[node] > MAX_PATHS {
                return Err(format!(
                    "too much work: more than {MAX_PATHS} ways lead from {} over $ref, allOf, anyOf, oneOf and the like to the \
                     subschemas that a single value is held to; reference each definition once",
                    at(node)
                ));
            }
            if chain[node] > MAX_CHAIN {
                return Err(format!(
                    "nested too deeply: a chain of more than {MAX_CHAIN} references begins at {}",
                    at(node)
                ));
            }
        }
        let (components, component_of) = self::components(self.nodes.len(), |node| self.nodes[node].all().collect());
        let mut ways = vec![1_u64; components.len()];
        for (number, component) in components.iter().enumerate() {
            let targets = component.iter().flat_map(|node| self.nodes[*node].all());
            let below = targets.map(|target| component_of[target]).filter(|target| *target != number);
            ways[number] = below.fold(0_u64, |sum, target| sum.saturating_add(ways[target])).max(1);
            if ways[number] > MAX_TOTAL_PATHS {
                return Err(format!(
                    "too much work: more than {MAX_TOTAL_PATHS} ways lead from {} to the subschemas below; reference each definition \
                     once",
                    at(component[0])
                ));
            }
        }
        Ok(())
    }
}

/// Returns the strongly connected components of the subschema graph, targets before sources, and each node's
/// component number (Tarjan 1972).
fn components(count: usize, edges: impl Fn(usize) -> Vec<usize>) -> (Vec<Vec<usize>>, Vec<usize>) {
    const NEW: usize = usize::MAX;
    let (mut index, mut low, mut component_of) = (vec![NEW; count], vec![0; count], vec![NEW; count]);
    let (mut components, mut open, mut next) = (Vec::new(), Vec::new(), 0);
    for root in 0..count {
        if index[root] != NEW {
            continue;
        }
        // Holds (node, its targets, number of targets done). An explicit stack, because a chain may be
        // longer than this thread's stack.
        let mut path: Vec<(usize, Vec<usize>, usize)> = Vec::new();
        let mut enter = Some(root);
        loop {
            if let Some(node) = enter.take() {
                (index[node], low[node]) = (next, next);
                next += 1;
                open.push(node);
                path.push((node, edges(node), 0));
            }
            let Some((node, targets, done)) = path.last_mut() else { break };
            let node = *node;
            if let Some(&target) = targets.get(*done) {
                *done += 1;
                if index[target] == NEW {
                    enter = Some(target);
                } else if component_of[target] == NEW {
                    low[node] = low[node].min(index[target]);
                }
                continue;
            }
            path.pop();
            if let Some((parent, ..)) = path.last() {
                low[*parent] = low[*parent].min(low[node]);
            }
            if low[node] == index[node] {
                let begin = open.iter().rposition(|other| *other == node).unwrap_or(0);
                let component = open.split_off(begin);
                component.iter().for_each(|member| component_of[*member] = components.len());
                components.push(component);
            }
        }
    }
    (components, component_of)
}

/// Finds subschemas by their JSON pointers and resolves references.
struct Builder<'s> {
    schema: &'s Value,
    draft: u16,
    found: Vec<(String, &'s Value)>,
    numbers: HashMap<String, usize>,
    /// JSON pointers by the address that `$id` gives.
    resources: HashMap<String, String>,
    /// JSON pointers by schema resource (the resource's own pointer) and anchor.
    anchors: HashMap<(String, String), String>,
    /// JSON pointers by dynamic anchor.
    dynamic: HashMap<String, Vec<String>>,
    has_dynamic_anchors: bool,
    to_metaschema: bool,
    unevaluated: bool,
    patterns_bytes: usize,
}

impl<'s> Builder<'s> {
    fn new(schema: &'s Value) -> Self {
        let dialect = schema.get("$schema").and_then(Value::as_str).unwrap_or_default();
        let drafts = [("draft-04", 4), ("draft-06", 6), ("draft-07", 7), ("2019-09", 2019)];
        let draft = drafts.iter().find(|(name, _)| dialect.contains(name)).map_or(2020, |(_, draft)| *draft);
        Self {
            schema,
            draft,
            found: Vec::new(),
            numbers: HashMap::new(),
            resources: HashMap::from([(SCHEMA_ADDRESS.to_owned(), String::new())]),
            anchors: HashMap::new(),
            dynamic: HashMap::new(),
            has_dynamic_anchors: false,
            to_metaschema: false,
            unevaluated: false,
            patterns_bytes: 0,
        }
    }

    /// Records a subschema and all subschemas below it; returns its index.
    fn find(&mut self, pointer: String, value: &'s Value) -> Result<usize, String> {
        if let Some(known) = self.numbers.get(&pointer) {
            return Ok(*known);
        }
        let number = self.found.len();
        let mut waiting = vec![(pointer, value)];
        while let Some((pointer, value)) = waiting.pop() {
            if self.numbers.contains_key(&pointer) {
                continue;
            }
            if self.found.len() >= MAX_SUBSCHEMAS {
                return Err(format!("too large: more than {MAX_SUBSCHEMAS} subschemas"));
            }
            self.numbers.insert(pointer.clone(), self.found.len());
            self.found.push((pointer.clone(), value));
            let Value::Object(object) = value else { continue };
            self.note_names(&pointer, object);
            for (keyword, inner) in object {
                let at = format!("{pointer}/{}", escaped(keyword));
                let name = keyword.as_str();
                match inner {
                    Value::Object(map) if MAPS.contains(&name) => {
                        waiting.extend(map.iter().map(|(name, inner)| (format!("{at}/{}", escaped(name)), inner)));
                    }
                    Value::Array(list) if LISTS.contains(&name) || name == "items" => {
                        waiting.extend(list.iter().enumerate().map(|(index, inner)| (format!("{at}/{index}"), inner)));
                    }
                    inner if SINGLE.contains(&name) || name == "items" => waiting.push((at, inner)),
                    _ => {}
                }
            }
        }
        Ok(number)
    }

    /// Records the addresses and anchors that a subschema declares.
    fn note_names(&mut self, pointer: &str, object: &Map<String, Value>) {
        let text = |keyword: &str| object.get(keyword).and_then(Value::as_str);
        let id = text(if self.draft == 4 { "id" } else { "$id" });
        let (resource, base) = self.base(pointer);
        match id {
            Some(fragment) if fragment.starts_with('#') => {
                self.anchors.insert((resource.clone(), fragment[1..].to_owned()), pointer.to_owned());
            }
            Some(_) => {
                self.resources.insert(without_fragment(base.as_str()).to_owned(), resource.clone());
            }
            None => {}
        }
        if let Some(anchor) = text("$anchor") {
            self.anchors.insert((resource.clone(), anchor.to_owned()), pointer.to_owned());
        }
        if let Some(anchor) = text("$dynamicAnchor") {
            self.has_dynamic_anchors = true;
            self.anchors.insert((resource, anchor.to_owned()), pointer.to_owned());
            self.dynamic.entry(anchor.to_owned()).or_default().push(pointer.to_owned());
        }
        self.has_dynamic_anchors |= object.get("$recursiveAnchor") == Some(&Value::Bool(true));
        self.unevaluated |= object.contains_key("unevaluatedItems") || object.contains_key("unevaluatedProperties");
    }

    /// Returns the resource that contains a subschema: its pointer and its address.
    fn base(&self, pointer: &str) -> (String, String) {
        let keyword = if self.draft == 4 { "id" } else { "$id" };
        let (mut at, mut resource, mut base) = (String::new(), String::new(), SCHEMA_ADDRESS.to_owned());
        let mut value = Some(self.schema);
        let mut tokens = pointer.split('/').skip(1);
        loop {
            let id = value.and_then(|value| value.get(keyword)).and_then(Value::as_str);
            if let Some(id) = id.filter(|id| !id.starts_with('#')) {
                base = joined(&base, id);
                resource.clone_from(&at);
            }
            let Some(token) = tokens.next() else { return (resource, base) };
            at = format!("{at}/{token}");
            value = value.and_then(|value| value.pointer(&format!("/{token}")));
        }
    }

    /// Resolves a reference to a subschema; `None` for a metaschema.
    fn resolve(&mut self, from: &str, reference: &str) -> Result<Option<usize>, String> {
        let lost = || {
            format!("the reference '{reference}' is not followed: use '#/$defs/NAME', or the '$anchor' of a subschema")
        };
        let (resource, base) = self.base(from);
        let (address, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let resource = if address.is_empty() {
            resource
        } else {
            let address = joined(&base, address);
            match self.resources.get(without_fragment(&address)) {
                Some(pointer) => pointer.clone(),
                None if address.contains("://json-schema.org/") => {
                    self.to_metaschema = true;
                    return Ok(None);
                }
                None => return Err(lost()),
            }
        };
        let fragment = percent_decoded(fragment).ok_or_else(lost)?;
        let pointer = if fragment.is_empty() || fragment.starts_with('/') {
            format!("{resource}{fragment}")
        } else {
            self.anchors.get(&(resource, fragment)).ok_or_else(lost)?.clone()
        };
        let value = self.schema.pointer(&pointer).ok_or_else(lost)?;
        // Every pointer needs a single spelling, because pointers are compared as text.
        let pointer: String = pointer
            .split('/')
            .skip(1)
            .fold(String::new(), |at, token| format!("{at}/{}", escaped(&token.replace("~1", "/").replace("~0", "~"))));
        self.find(pointer, value).map(Some)
    }

    fn node(&mut self, pointer: &str, value: &'s Value) -> Result<Node, String> {
        let mut node = Node::default();
        let Value::Object(object) = value else { return Ok(node) };
        if let Some(reference) = object.get("$ref").and_then(Value::as_str) {
            match self.resolve(pointer, reference)? {
                Some(target) => node.same.push(target),
                None => node.metaschemas += 1,
            }
            // Up to draft 7, keywords beside a reference are ignored.
            if self.draft < 2019 {
                return Ok(node);
            }
        }
        self.read_dynamic(pointer, object, &mut node)?;
        let numbers = &self.numbers;
        let number = |keyword: &str| numbers.get(&format!("{pointer}/{}", escaped(keyword))).copied();
        let list = |keyword: &str| {
            let items = object.get(keyword).and_then(Value::as_array).map_or(0, Vec::len);
            let at = |index: usize| numbers.get(&format!("{pointer}/{keyword}/{index}")).copied();
            (0..items).filter_map(at).collect::<Vec<usize>>()
        };
        let map = |keyword: &str| -> Vec<(String, usize)> {
            let names = object.get(keyword).and_then(Value::as_object).into_iter().flat_map(Map::keys);
            let at = |name: &String| numbers.get(&format!("{pointer}/{}/{}", escaped(keyword), escaped(name))).copied();
            names.filter_map(|name| Some((name.clone(), at(name)?))).collect()
        };
        node.same.extend(["allOf", "anyOf", "oneOf"].into_iter().flat_map(list));
        node.same.extend(["not", "if", "then", "else"].into_iter().filter_map(number));
        node.dependent = ["dependentSchemas", "dependencies"].into_iter().flat_map(map).collect();
        node.properties = map("properties").into_iter().collect();
        node.patterns = map("patternProperties").into_iter().map(|(_, target)| target).collect();
        node.additional = number("additionalProperties");
        node.unevaluated_properties = number("unevaluatedProperties");
        node.names = number("propertyNames");
        node.prefix = if self.draft < 2020 { list("items") } else { list("prefixItems") };
        let listed = object.get("items").is_some_and(Value::is_array);
        node.items = if listed { number("additionalItems") } else { number("items") };
        node.unevaluated_items = number("unevaluatedItems");
        node.contains = number("contains");
        node.unique = object.get("uniqueItems") == Some(&Value::Bool(true));
        self.read_assertions(object, &mut node)?;
        Ok(node)
    }

    fn read_dynamic(&mut self, pointer: &str, object: &Map<String, Value>, node: &mut Node) -> Result<(), String> {
        if let Some(reference) = object.get("$dynamicRef").and_then(Value::as_str).filter(|_| self.draft >= 2020) {
            let mut group: Vec<usize> = Vec::new();
            match self.resolve(pointer, reference)? {
                Some(target) => group.push(target),
                None => node.metaschemas += 1,
            }
            let anchor = reference.split_once('#').map_or("", |(_, anchor)| anchor);
            for target in self.dynamic.get(anchor).cloned().unwrap_or_default() {
                group.extend(self.numbers.get(&target));
            }
            node.push_choice(group);
            // Resolving `$dynamicRef`, the validator searches the whole path that led here for the anchor.
            node.weight += 32;
        }
        if let Some(reference) = object.get("$recursiveRef").and_then(Value::as_str).filter(|_| self.draft == 2019) {
            let inner =
                self.found.iter().skip(1).any(|(_, value)| value.get("$recursiveAnchor") == Some(&Value::Bool(true)));
            if inner {
                return Err("$recursiveAnchor is followed at the root of the schema only: use $ref".to_owned());
            }
            let mut group: Vec<usize> = self.resolve(pointer, reference)?.into_iter().collect();
            group.push(0);
            node.push_choice(group);
            node.weight += 32;
        }
        Ok(())
    }

    fn read_assertions(&mut self, object: &Map<String, Value>, node: &mut Node) -> Result<(), String> {
        let length = |keyword: &str| match object.get(keyword) {
            Some(Value::Array(list)) => list.len(),
            Some(Value::Object(map)) => map.len(),
            _ => 0,
        };
        let spelled: usize =
            ["required", "enum", "dependentRequired", "patternProperties"].into_iter().map(length).sum();
        node.weight += spelled as u64 / 16;
        let name = |name: &Value| name.as_str().map(|name| if name == "integer" { "number" } else { name }.to_owned());
        node.types = match object.get("type") {
            Some(Value::Array(names)) => Some(names.iter().filter_map(name).collect()),
            Some(one) => name(one).map(|name| vec![name]),
            None => None,
        };
        node.fixed = match (object.get("const"), object.get("enum")) {
            (Some(value), _) if self.draft >= 6 => Some(vec![value.clone()]),
            (_, Some(Value::Array(values))) => Some(values.clone()),
            _ => None,
        };
        node.per_kib = 1;
        let patterns = object.get("patternProperties").and_then(Value::as_object).into_iter().flat_map(Map::keys);
        for pattern in patterns.map(String::as_str).chain(object.get("pattern").and_then(Value::as_str)) {
            let size_bytes = pattern_size(pattern)
                .ok_or_else(|| "too large: a pattern takes more than 1 MiB when it is compiled".to_owned())?;
            self.patterns_bytes += size_bytes;
            if self.patterns_bytes > ALL_PATTERNS_BYTES {
                return Err(format!(
                    "too large: its patterns take more than {} MiB when they are compiled",
                    ALL_PATTERNS_BYTES >> 20
                ));
            }
            // The pattern matcher compares, in the worst case, each byte of the text with each state of its automaton.
            node.per_kib += size_bytes as u64 / 256;
        }
        // Up to draft 7, `format` is enforced. The format `regex` compiles every text.
        if object.get("format").and_then(Value::as_str) == Some("regex") && self.draft < 2019 {
            node.weight += 1_000;
            node.per_kib += 100_000;
        }
        Ok(())
    }
}

/// Returns the compiled size of a pattern, rounded up; `None` above [`PATTERN_BYTES`]. The validator reads patterns as ECMAScript
/// does, where `\w` and similar classes are ASCII. A pattern that cannot be parsed here counts as the largest size.
fn pattern_size(pattern: &str) -> Option<usize> {
    let sizes = [1 << 12, 1 << 14, 1 << 16, 1 << 18, PATTERN_BYTES];
    let builds = |size: usize, unicode: bool| RegexBuilder::new(pattern).unicode(unicode).size_limit(size).build();
    let unicode = matches!(builds(PATTERN_BYTES, false), Err(regex::Error::Syntax(_)));
    if unicode && matches!(builds(PATTERN_BYTES, true), Err(regex::Error::Syntax(_))) {
        return Some(PATTERN_BYTES);
    }
    sizes.into_iter().find(|size| builds(*size, unicode).is_ok())
}

fn joined(base: &str, reference: &str) -> String {
    let url = Url::parse(base).and_then(|base| base.join(reference));
    url.map_or_else(|_| reference.to_owned(), String::from)
}

fn without_fragment(address: &str) -> &str {
    address.split_once('#').map_or(address, |(address, _)| address)
}

fn escaped(token: &str) -> String {
    token.replace('~', "~0").replace('/', "~1")
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
        let (high, low) = (digit(bytes.next())?, digit(bytes.next())?);
        decoded.push(u8::try_from(high * 16 + low).ok()?);
    }
    String::from_utf8(decoded).ok()
}
