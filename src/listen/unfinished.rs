//! Bodies that are arriving, of clients that nobody knows yet: a bounded number, and a new one is never refused. Where there
//! are too many, the oldest of the address that has the most makes room, so that a client which begins many and finishes none
//! is in the way of its own only.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use tokio_util::sync::CancellationToken;

/// The bodies that are arriving.
#[derive(Debug)]
pub struct Unfinished {
    most: usize,
    most_of_address: usize,
    /// Oldest first.
    bodies: Mutex<Vec<Entry>>,
}

#[derive(Debug)]
struct Entry {
    /// None = from no socket.
    address: Option<IpAddr>,
    displaced: CancellationToken,
}

/// The place of one body; given back when dropped.
#[derive(Debug)]
pub struct Place<'a> {
    all: &'a Unfinished,
    displaced: CancellationToken,
}

impl Unfinished {
    /// At most `most` bodies, and `most_of_address` of one address.
    pub const fn new(most: usize, most_of_address: usize) -> Self {
        Self { most, most_of_address, bodies: Mutex::new(Vec::new()) }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Entry>> {
        self.bodies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a new body; another one may lose its own. `address` stands for a client: None = from no socket.
    pub fn enter(&self, address: Option<IpAddr>) -> Place<'_> {
        let mut all = self.lock();
        if all.iter().filter(|entry| entry.address == address).count() >= self.most_of_address {
            displace_oldest(&mut all, address);
        } else if all.len() >= self.most {
            displace_greediest(&mut all);
        }
        let displaced = CancellationToken::new();
        all.push(Entry { address, displaced: displaced.clone() });
        Place { all: self, displaced }
    }
}

fn displace_oldest(all: &mut Vec<Entry>, address: Option<IpAddr>) {
    if let Some(oldest) = all.iter().position(|entry| entry.address == address) {
        all.remove(oldest).displaced.cancel();
    }
}

/// The oldest of the address that has the most; of several such addresses, the one whose oldest is oldest.
fn displace_greediest(all: &mut Vec<Entry>) {
    let mut counts: HashMap<Option<IpAddr>, usize> = HashMap::new();
    all.iter().for_each(|entry| *counts.entry(entry.address).or_default() += 1);
    let addresses = all.iter().rev().map(|entry| entry.address);
    if let Some(greediest) = addresses.max_by_key(|address| counts.get(address).copied()) {
        displace_oldest(all, greediest);
    }
}

impl Place<'_> {
    /// Returns when a newer body took the place.
    pub async fn lost(&self) {
        self.displaced.cancelled().await;
    }

    /// Lets the greediest address lose a place, so that what that body held is free.
    pub fn make_room(&self) {
        displace_greediest(&mut self.all.lock());
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if !self.displaced.is_cancelled() {
            // So that its own entry is known among the others.
            self.displaced.cancel();
            self.all.lock().retain(|entry| !entry.displaced.is_cancelled());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: usize = 256;
    const MOST_OF_ADDRESS: usize = 16;

    fn address(number: u8) -> Option<IpAddr> {
        Some(IpAddr::from([192, 0, 2, number]))
    }

    fn is_lost(place: &Place<'_>) -> bool {
        place.displaced.is_cancelled()
    }

    #[test]
    fn an_address_with_too_many_loses_its_own_oldest() {
        let all = Unfinished::new(MOST, MOST_OF_ADDRESS);
        let other = all.enter(address(2));
        let mut places: Vec<Place<'_>> = (0..MOST_OF_ADDRESS).map(|_| all.enter(address(1))).collect();
        assert!(!places.iter().any(is_lost));
        places.push(all.enter(address(1)));
        assert_eq!(places.iter().map(is_lost).filter(|lost| *lost).count(), 1);
        assert!(is_lost(&places[0]) && !is_lost(&other));
        // What ended makes room without harm to others.
        places.remove(1);
        places.push(all.enter(address(1)));
        assert_eq!(places.iter().filter(|place| is_lost(place)).count(), 1);
        drop((places, other));
        assert!(all.lock().is_empty());
    }

    #[test]
    fn beyond_the_whole_the_greediest_address_makes_room() {
        let all = Unfinished::new(MOST, MOST_OF_ADDRESS);
        let greedy: Vec<Place<'_>> = (0..MOST_OF_ADDRESS).map(|_| all.enter(address(255))).collect();
        let mut places = Vec::new();
        while all.lock().len() < MOST {
            places.push(all.enter(address((places.len() % 240) as u8)));
        }
        let new = all.enter(address(250));
        assert!(is_lost(&greedy[0]) && !is_lost(&new) && !places.iter().any(is_lost));
        assert_eq!(all.lock().len(), MOST);
    }
}
