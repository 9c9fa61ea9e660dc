//! The server under test: a real database and real files, which can be killed at any failpoint as by `kill -9`. The next server
//! opens a copy of the disk's content at that moment.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use tempfile::TempDir;

use super::random::Random;
use rlood_store::Store;
use rlood_store::files::DataDir;
use rlood_store::leases::LeaseWatch;
use rlood_store::recovery::recover;
use rlood_types::failpoint::{self, Action};

pub(super) const LEASE: i64 = 30_000;

/// Returns a directory on a fast file system in memory if possible, because a sequence syncs hundreds of times.
pub(super) fn memory_dir() -> PathBuf {
    let shm = PathBuf::from("/dev/shm");
    if tempfile::tempdir_in(&shm).is_ok() { shm } else { std::env::temp_dir() }
}

/// The result of a call.
#[derive(Debug)]
pub(super) enum Called<T> {
    Answered(T),
    /// The server died during the call; `applied` = after the change was durable.
    Lost {
        applied: bool,
    },
}

/// The failpoint at which the server dies.
#[derive(Debug, Default)]
struct Death {
    /// Number of failpoints to pass before it dies.
    left: usize,
    from: PathBuf,
    to: PathBuf,
    at: Option<String>,
}

pub(super) struct Server {
    pub(super) store: Store,
    pub(super) files: DataDir,
    pub(super) watch: LeaseWatch,
    /// Times of the wall clock and of the steady clock, in milliseconds.
    pub(super) wall: i64,
    pub(super) steady: i64,
    root: TempDir,
}

impl Server {
    /// Starts a server on a copy of a prepared data directory.
    pub(super) async fn start(template: &Path) -> Self {
        let root = fresh_root();
        copy_tree(template, root.path());
        let files = DataDir::open(root.path()).unwrap();
        let store = Store::open(&files.database()).await.unwrap();
        let (wall, steady) = (1_800_000_000_000, 0);
        Self { store, files, watch: LeaseWatch::new(wall, steady, LEASE), wall, steady, root }
    }

    /// Makes a call during which the server may die. If it does, another one has started when this returns.
    pub(super) async fn call<T, E>(
        &mut self,
        random: &mut Random,
        call: impl Future<Output = Result<T, E>>,
    ) -> Result<Called<Result<T, E>>, String> {
        let Some(death) = self.may_die(random, 12) else { return Ok(Called::Answered(call.await)) };
        let answer = call.await;
        failpoint::set_hook(None);
        let death = death.take();
        let Some(at) = death.at else { return Ok(Called::Answered(answer)) };
        self.start_in(death.to, random).await?;
        let applied = at.starts_with("store.after_commit") || at == "publish.published";
        Ok(Called::Lost { applied })
    }

    /// Stops the server regularly and starts another one.
    pub(super) async fn restart(&mut self, random: &mut Random) -> Result<(), String> {
        self.store.close().await;
        let to = fresh_root().keep();
        copy_tree(self.root.path(), &to);
        self.start_in(to, random).await
    }

    fn may_die(&self, random: &mut Random, one_in: usize) -> Option<Rc<RefCell<Death>>> {
        if !random.one_in(one_in) {
            return None;
        }
        let death = Death { left: random.below(3), from: self.root.path().to_owned(), to: PathBuf::new(), at: None };
        let death = Rc::new(RefCell::new(death));
        let hooked = death.clone();
        failpoint::set_hook(Some(Box::new(move |point| {
            let mut death = hooked.borrow_mut();
            if death.at.is_none() {
                if death.left > 0 {
                    death.left -= 1;
                    return None;
                }
                death.to = fresh_root().keep();
                copy_tree(&death.from, &death.to);
                death.at = Some(point.to_owned());
            }
            // A dead server does nothing more.
            Some(Action::Error)
        })));
        Some(death)
    }

    /// Starts a new server in this directory; it may die during the start, too.
    async fn start_in(&mut self, mut dir: PathBuf, random: &mut Random) -> Result<(), String> {
        let down = random.from(0, 240_000);
        self.steady += down;
        self.wall += down;
        loop {
            let root = adopted(&dir);
            self.files = DataDir::open(root.path()).map_err(|error| format!("the next server: {error}"))?;
            let stale = std::mem::replace(
                &mut self.store,
                Store::open(&self.files.database()).await.map_err(|error| format!("the next server: {error}"))?,
            );
            // No other user of the store is left.
            stale.close().await;
            self.root = root;
            let death = self.may_die(random, 6);
            let recovered = recover(&self.store, &self.files, LEASE, self.wall).await;
            failpoint::set_hook(None);
            match (recovered, death.map(|death| death.take())) {
                (_, Some(Death { at: Some(_), to, .. })) => dir = to,
                (Err(error), _) => return Err(format!("the next server cannot start: {error}")),
                (Ok(()), _) => break,
            }
        }
        self.watch = LeaseWatch::new(self.wall, self.steady, LEASE);
        Ok(())
    }
}

pub(super) fn fresh_root() -> TempDir {
    tempfile::Builder::new().prefix("rlood-model-").tempdir_in(memory_dir()).unwrap()
}

/// Takes over a directory, which is removed when dropped.
fn adopted(dir: &Path) -> TempDir {
    let root = fresh_root();
    std::fs::remove_dir(root.path()).unwrap();
    std::fs::rename(dir, root.path()).unwrap();
    root
}

/// Copies what a process that dies leaves behind: the files, without sharing them with other processes.
fn copy_tree(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (path, name) = (entry.path(), entry.file_name());
        if path.is_dir() {
            std::fs::create_dir_all(to.join(&name)).unwrap();
            copy_tree(&path, &to.join(&name));
        } else if !name.to_string_lossy().ends_with("-shm") && name != "rlood.lock" {
            std::fs::copy(&path, to.join(&name)).unwrap();
        }
    }
}
