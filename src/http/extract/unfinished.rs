//! Bodies of requests without a credential (sign-ins) while they arrive: a bounded number, of which a new one is never refused.
//! Where there are too many, the oldest of the address that has the most makes room, so that a client which opens many and
//! finishes none is in the way of its own only.

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use tokio_util::sync::CancellationToken;

/// Unfinished bodies of all addresses.
pub(super) const MOST: usize = 256;
/// Of them, those of one address.
const MOST_OF_ADDRESS: usize = 16;

/// The bodies that are arriving, oldest first.
pub(super) struct Unfinished(Mutex<Vec<Entry>>);

struct Entry {
    /// None = from no socket.
    address: Option<IpAddr>,
    displaced: CancellationToken,
}

/// The place of one body; given back when dropped.
pub(super) struct Place<'a> {
    all: &'a Unfinished,
    displaced: CancellationToken,
}

impl Unfinished {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a new body; another one may lose its own.
    pub(super) fn enter(&self, address: Option<IpAddr>) -> Place<'_> {
        let mut all = self.lock();
        let count = |address| all.iter().filter(|entry| entry.address == address).count();
        let crowded = if count(address) >= MOST_OF_ADDRESS {
            Some(address)
        } else if all.len() >= MOST {
            // The first maximum from the back is the address whose oldest body is oldest.
            all.iter().rev().map(|entry| entry.address).max_by_key(|address| count(*address))
        } else {
            None
        };
        if let Some(crowded) = crowded
            && let Some(oldest) = all.iter().position(|entry| entry.address == crowded)
        {
            all.remove(oldest).displaced.cancel();
        }
        let displaced = CancellationToken::new();
        all.push(Entry { address, displaced: displaced.clone() });
        Place { all: self, displaced }
    }
}

impl Place<'_> {
    /// Returns when a newer body took the place.
    pub(super) async fn lost(&self) {
        self.displaced.cancelled().await;
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

    fn address(number: u8) -> Option<IpAddr> {
        Some(IpAddr::from([192, 0, 2, number]))
    }

    fn is_lost(place: &Place<'_>) -> bool {
        place.displaced.is_cancelled()
    }

    #[test]
    fn an_address_with_too_many_loses_its_own_oldest() {
        let all = Unfinished::new();
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
        let all = Unfinished::new();
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
