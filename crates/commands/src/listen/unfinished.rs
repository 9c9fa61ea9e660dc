//! Limits the number of bodies that are arriving from unauthenticated clients, without ever refusing a new one. When there are too
//! many, the oldest body of the address with the most bodies is dropped, so that a client that starts many and finishes
//! none affects only itself.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use tokio_util::sync::CancellationToken;

/// The request bodies that are arriving.
#[derive(Debug)]
pub struct Unfinished {
    most: usize,
    most_of_address: usize,
    /// The arriving bodies, oldest first.
    bodies: Mutex<Vec<Entry>>,
}

#[derive(Debug)]
struct Entry {
    /// The client's address; None if the request did not come from a socket.
    address: Option<IpAddr>,
    displaced: CancellationToken,
}

/// The slot of one arriving body; released when the value is dropped.
#[derive(Debug)]
pub struct Place<'a> {
    all: &'a Unfinished,
    displaced: CancellationToken,
}

impl Unfinished {
    /// Creates a limit of `most` arriving bodies in total, and `most_of_address` per address.
    pub const fn new(most: usize, most_of_address: usize) -> Self {
        Self { most, most_of_address, bodies: Mutex::new(Vec::new()) }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Entry>> {
        self.bodies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a slot for a new body. At the limit, another body is displaced: its request fails. `address` identifies the
    /// client; None = not from a socket.
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

/// Displaces the oldest body of the address with the most bodies. Among several such addresses, the one with the
/// oldest body is chosen.
fn displace_greediest(all: &mut Vec<Entry>) {
    let mut counts: HashMap<Option<IpAddr>, usize> = HashMap::new();
    all.iter().for_each(|entry| *counts.entry(entry.address).or_default() += 1);
    let addresses = all.iter().rev().map(|entry| entry.address);
    if let Some(greediest) = addresses.max_by_key(|address| counts.get(address).copied()) {
        displace_oldest(all, greediest);
    }
}

impl Place<'_> {
    /// Returns when a newer body has displaced this one, and its request must fail.
    pub async fn lost(&self) {
        self.displaced.cancelled().await;
    }

    /// Displaces the oldest body of the address with the most bodies, so that its memory is freed.
    pub fn make_room(&self) {
        displace_greediest(&mut self.all.lock());
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if !self.displaced.is_cancelled() {
            // Cancelling its own token marks the slot's entry, so that the next line removes it.
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
        // When a body is complete, its slot is free again and the next body displaces none.
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
