//! The keys of the rows so far, for the setting `unique` (no two rows with the same key): 128 bits of each key's hash, in tables
//! that grow by a quarter.

use sha2::{Digest, Sha256};

/// Number of tables among which the hashes are distributed by their first bits, so that growing copies only one table at a time.
const TABLES: usize = 256;
const INITIAL_SLOTS: usize = 16;

/// A set of hashed keys.
#[derive(Debug)]
pub struct Keys {
    tables: Vec<Table>,
}

#[derive(Debug, Default)]
struct Table {
    /// The slots of each table; 0 marks a free slot.
    slots: Vec<u128>,
    used: usize,
}

impl Keys {
    /// Creates an empty set of keys.
    pub fn new() -> Keys {
        Keys { tables: (0..TABLES).map(|_| Table::default()).collect() }
    }

    /// Inserts a row's key. Returns whether the set did not contain it before.
    pub fn insert(&mut self, key: &[u8]) -> bool {
        let digest: [u8; 32] = Sha256::digest(key).into();
        let (start, _) = digest.split_at(16);
        let mut bytes = [0; 16];
        bytes.copy_from_slice(start);
        let hash = u128::from_be_bytes(bytes).max(1);
        let table = (hash >> 120) as usize;
        self.tables.get_mut(table).is_none_or(|table| table.insert(hash))
    }

    /// Returns the bytes of memory that the tables use.
    #[cfg(test)]
    fn bytes(&self) -> usize {
        self.tables.iter().map(|table| table.slots.capacity() * 16).sum()
    }
}

impl Table {
    fn insert(&mut self, hash: u128) -> bool {
        if self.used * 10 >= self.slots.len() * 9 {
            let more = (self.slots.len() / 4).max(INITIAL_SLOTS);
            let larger = vec![0; self.slots.len() + more];
            for known in std::mem::replace(&mut self.slots, larger) {
                if known != 0 {
                    self.insert_hash(known);
                }
            }
        }
        let is_new = self.insert_hash(hash);
        self.used += usize::from(is_new);
        is_new
    }

    /// Inserts a hash into a table with a free slot. Returns whether the hash is new.
    fn insert_hash(&mut self, hash: u128) -> bool {
        let length = self.slots.len();
        let first = (((hash & u128::from(u64::MAX)) * length as u128) >> 64) as usize;
        for step in 0..length {
            let at = (first + step) % length;
            match self.slots.get_mut(at) {
                Some(slot) if *slot == 0 => {
                    *slot = hash;
                    return true;
                }
                Some(slot) if *slot == hash => return false,
                Some(_) | None => {}
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_new_once_and_takes_at_most_24_bytes() {
        let mut keys = Keys::new();
        let mut most = 0.0_f64;
        for n in 0..300_000_u32 {
            assert!(keys.insert(&n.to_le_bytes()), "{n}");
            if n > 50_000 {
                most = most.max(keys.bytes() as f64 / f64::from(n + 1));
            }
        }
        assert!((0..300_000_u32).all(|n| !keys.insert(&n.to_le_bytes())));
        assert!(most <= 24.0, "{most} bytes a key");
    }
}
