//! What the templates of chats and of rewards share: JSON as their values, and an output that has an end.

use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{Enumerator, Object, ObjectRepr};

/// An output that cannot grow without end.
#[derive(Debug)]
pub struct Bounded {
    bytes: Vec<u8>,
    most: usize,
}

impl Bounded {
    /// Of so many bytes at most.
    pub fn new(most: usize) -> Bounded {
        Bounded { bytes: Vec::new(), most }
    }

    /// What was written.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

impl std::io::Write for Bounded {
    fn write(&mut self, part: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len() + part.len() > self.most {
            return Err(std::io::Error::other("the rendered text is too long"));
        }
        self.bytes.extend_from_slice(part);
        Ok(part.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A JSON object that keeps its order.
#[derive(Debug)]
pub struct Ordered(pub Vec<(String, Value)>);

impl Object for Ordered {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let key = key.as_str()?;
        self.0.iter().find(|(name, _)| name == key).map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.iter().map(|(name, _)| Value::from(name.as_str())).collect())
    }
}

/// JSON as templates see it; objects keep their order.
pub fn to_value(json: &serde_json::Value) -> Value {
    match json {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(b) => Value::from(*b),
        serde_json::Value::Number(n) => match (n.as_i64(), n.as_u64(), n.as_f64()) {
            (Some(i), _, _) => Value::from(i),
            (_, Some(u), _) => Value::from(u),
            (_, _, f) => Value::from(f.unwrap_or(f64::NAN)),
        },
        serde_json::Value::String(s) => Value::from(s.as_str()),
        serde_json::Value::Array(list) => list.iter().map(to_value).collect(),
        serde_json::Value::Object(map) => {
            Value::from_object(Ordered(map.iter().map(|(k, v)| (k.clone(), to_value(v))).collect()))
        }
    }
}
