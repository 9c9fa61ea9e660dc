//! Checks of the machine: file system, fsync, open files, certificates.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Network file systems. SQLite's write-ahead log needs shared memory through the file, and reliable locks.
const NETWORK: &[&str] = &[
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "afs",
    "ncpfs",
    "fuse.sshfs",
    "fuse.s3fs",
    "fuse.rclone",
    "ceph",
    "lustre",
];
/// File systems that lose their contents when the machine restarts.
const VOLATILE: &[&str] = &["tmpfs", "ramfs"];
/// Duration of a synced write above which every database change is noticeably slow.
const SLOW: Duration = Duration::from_millis(100);
/// Minimum number of open files that a server needs.
const FILES: u64 = 1024;

/// Returns the nearest existing directory above a path.
pub(super) fn nearest(dir: &Path) -> PathBuf {
    let absolute = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
    let found = absolute.ancestors().find(|ancestor| ancestor.is_dir()).unwrap_or(Path::new("/"));
    found.canonicalize().unwrap_or_else(|_| found.to_owned())
}

pub(super) fn check_file_system(dir: &Path) -> Result<String, String> {
    let dir = nearest(dir);
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let Some((point, kind)) = mount_of(&mounts, &dir) else {
        return Ok(
            "the type of the file system is unknown; the data directory must be on a local file system".to_owned()
        );
    };
    if NETWORK.contains(&kind.as_str()) {
        return Err(format!(
            "the file system at {point} is {kind}, but the database needs a local one; choose another --data-dir, and keep backups at {point}"
        ));
    }
    if VOLATILE.contains(&kind.as_str()) {
        return Ok(format!("the file system at {point} is {kind}: all data is lost when the machine restarts"));
    }
    Ok(format!("{kind} at {point}"))
}

/// Finds the mount that contains a path: the longest mount point above the path, and of equal ones the last,
/// which hides the others.
fn mount_of(mounts: &str, path: &Path) -> Option<(String, String)> {
    let mut best: Option<(String, String)> = None;
    for line in mounts.lines() {
        let mut words = line.split(' ').skip(1);
        let (Some(point), Some(kind)) = (words.next(), words.next()) else { continue };
        // Spaces in a mount point are encoded as \040.
        let point = point.replace("\\040", " ");
        if path.starts_with(&point) && best.as_ref().is_none_or(|(known, _)| point.len() >= known.len()) {
            best = Some((point, kind.to_owned()));
        }
    }
    best
}

/// Measures a few synced writes, as every change of the database makes them.
pub(super) fn check_fsync(dir: &Path) -> Result<String, String> {
    let dir = nearest(dir);
    let failed = |error: std::io::Error| format!("a file in {} cannot be written and synced: {error}", dir.display());
    let mut file = tempfile::tempfile_in(&dir).map_err(failed)?;
    let mut times = Vec::new();
    for _ in 0..9 {
        let begun = Instant::now();
        file.write_all(&[0; 4096]).and_then(|()| file.sync_all()).map_err(failed)?;
        times.push(begun.elapsed());
    }
    times.sort_unstable();
    let median = times[times.len() / 2];
    let slow = if median > SLOW { ", which is slow: every database change waits for such a write" } else { "" };
    Ok(format!("a write to the disk takes {:.1} ms{slow}", median.as_secs_f64() * 1e3))
}

pub(super) fn check_open_files(connections: u32) -> Result<String, String> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    match limit.maximum {
        Some(most) if most < FILES => Err(format!(
            "at most {most} open files are allowed (ulimit -Hn): at least {FILES} are required, more for many connections; raise the limit"
        )),
        Some(most) if most < u64::from(connections) + 256 => Ok(format!(
            "at most {most} open files are allowed (ulimit -Hn): too few for --max-connections {connections}"
        )),
        Some(most) => Ok(format!("up to {most} open files are allowed, enough for {connections} connections")),
        None => Ok(format!("open files have no limit; the server accepts {connections} connections")),
    }
}

pub(super) fn check_certificates() -> Result<String, String> {
    match rustls_native_certs::load_native_certs().certs.len() {
        0 => Ok("no certificate authorities were found: https rewards and webhooks will fail; install ca-certificates or set SSL_CERT_FILE".to_owned()),
        number => Ok(format!("{number} certificate authorities for https rewards and webhooks")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_mount_counts() {
        let mounts = "overlay / overlay rw 0 0\nx /data nfs4 rw 0 0\ny /data/my\\040disk ext4 rw 0 0\n";
        let kind = |path: &str| mount_of(mounts, Path::new(path)).map(|(_, kind)| kind);
        assert_eq!(kind("/home").as_deref(), Some("overlay"));
        assert_eq!(kind("/data/rlood").as_deref(), Some("nfs4"));
        assert_eq!(kind("/database").as_deref(), Some("overlay"));
        assert_eq!(kind("/data/my disk/x").as_deref(), Some("ext4"));
    }
}
