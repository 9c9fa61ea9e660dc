use std::time::Duration;

use super::*;

fn key(letter: char) -> String {
    letter.to_string().repeat(64)
}

/// Adds a model of `bytes` bytes that was last used `age_s` seconds ago.
fn fetch(cache: &ModelCache, letter: char, bytes: usize, age_s: u64) {
    let Found::Missing(fetching) = cache.find(&key(letter)).unwrap() else { panic!("{letter} is there already") };
    let dir = fetching.prepare(&format!("org/{letter}"), bytes as u64).unwrap();
    fs::write(dir.join("weights"), vec![0; bytes]).unwrap();
    assert!(matches!(fetching.publish(&["weights"]).unwrap(), Found::Ready(_)));
    let used_at = SystemTime::now() - Duration::from_secs(age_s);
    cache.open_lock(&key(letter)).unwrap().set_modified(used_at).unwrap();
}

fn names(cache: &ModelCache) -> Vec<String> {
    cache.entries().unwrap().into_iter().map(|entry| entry.name).collect()
}

fn lease(cache: &ModelCache, letter: char) -> Lease {
    match cache.find(&key(letter)).unwrap() {
        Found::Ready(lease) => lease,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_least_recently_used_models_are_removed_unless_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let cache = ModelCache::open(dir.path(), Some(100)).unwrap();
    fetch(&cache, 'a', 40, 300);
    fetch(&cache, 'b', 30, 200);
    fetch(&cache, 'c', 30, 100);
    assert_eq!(names(&cache), ["org/a", "org/b", "org/c"]);
    // The oldest model is in use, so the next one is removed.
    let used = lease(&cache, 'a');
    fetch(&cache, 'd', 20, 0);
    assert!(used.dir().join("weights").is_file());
    assert_eq!(names(&cache), ["org/c", "org/a", "org/d"]);
    drop(used);
    // Its use made it more recent than the third.
    fetch(&cache, 'e', 40, 0);
    assert_eq!(names(&cache), ["org/d", "org/a", "org/e"]);
}

#[test]
fn a_model_that_does_not_fit_reports_the_limit_and_removes_no_model_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let cache = ModelCache::open(dir.path(), Some(100)).unwrap();
    fetch(&cache, 'a', 60, 0);
    let used = lease(&cache, 'a');
    let Found::Missing(fetching) = cache.find(&key('b')).unwrap() else { panic!() };
    let error = fetching.prepare("org/b", 50).unwrap_err();
    assert!(matches!(error, CacheFull::InUse { size_bytes: 50, limit_bytes: 100, used_bytes: 60 }), "{error:?}");
    assert!(error.advice().contains("--cache-limit"), "{error}");
    let error = fetching.prepare("org/b", 101).unwrap_err();
    assert!(matches!(error, CacheFull::OverLimit { size_bytes: 101, limit_bytes: 100 }), "{error:?}");
    let unlimited = ModelCache::open(dir.path(), None).unwrap();
    let Found::Missing(fetching) = unlimited.find(&key('c')).unwrap() else { panic!() };
    let error = fetching.prepare("org/c", u64::MAX / 2).unwrap_err();
    assert!(error.advice().contains("--cache-dir"), "{error}");
    assert!(used.dir().join("weights").is_file());
}

#[test]
fn one_process_downloads_and_the_others_wait() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (ModelCache::open(dir.path(), None).unwrap(), ModelCache::open(dir.path(), None).unwrap());
    let Found::Missing(fetching) = one.find(&key('a')).unwrap() else { panic!() };
    assert!(matches!(other.find(&key('a')).unwrap(), Found::Busy));
    let part = fetching.prepare("org/a", 3).unwrap();
    fs::write(part.join("weights"), "ab").unwrap();
    let entry = other.entries().unwrap().remove(0);
    assert_eq!((entry.size_bytes, entry.is_whole, entry.in_use), (3, false, true), "what it will take");
    assert_eq!(entry.missing_bytes, 1);
    // Dropping the right simulates the end of the process.
    drop(fetching);
    let entry = other.entries().unwrap().remove(0);
    assert_eq!((entry.size_bytes, entry.is_whole, entry.in_use), (2, false, false), "what is there");
    let Found::Missing(fetching) = other.find(&key('a')).unwrap() else { panic!() };
    let part = fetching.prepare("org/a", 3).unwrap();
    assert_eq!(fs::read_to_string(part.join("weights")).unwrap(), "ab", "the next one continues");
    fs::write(part.join("weights"), "abc").unwrap();
    fs::write(part.join("of-an-older-list"), "x").unwrap();
    let Found::Ready(first) = fetching.publish(&["weights"]).unwrap() else { panic!() };
    assert_eq!(fs::read_dir(first.dir()).unwrap().count(), 1);
    let second = lease(&one, 'a');
    assert_eq!(first.dir(), second.dir());
    assert!(!one.remove(&key('a')).unwrap(), "in use");
    drop((first, second));
    assert!(one.remove(&key('a')).unwrap());
    assert_eq!(one.entries().unwrap(), []);
}

#[test]
fn a_name_that_is_no_fingerprint_never_becomes_a_path() {
    let dir = tempfile::tempdir().unwrap();
    let cache = ModelCache::open(dir.path(), None).unwrap();
    for bad in ["../../etc", "", "abc", &"/".repeat(64)] {
        assert!(cache.find(bad).is_err(), "{bad}");
    }
}

#[test]
fn a_directory_of_another_user_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    ModelCache::open(dir.path(), None).unwrap();
    // Only root can change the owner of a directory.
    if std::os::unix::fs::chown(dir.path().join("models"), Some(12345), None).is_ok() {
        let error = ModelCache::open(dir.path(), None).unwrap_err();
        assert!(error.to_string().contains("12345"), "{error}");
    }
}
