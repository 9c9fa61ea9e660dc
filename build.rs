//! Compresses and lists the dashboard's files for `src/http/web.rs`, the documents for `src/http/guide.rs`, the bundled models for
//! `src/bundle.rs`, and the files of Swagger UI for `src/http/docs.rs`. Asks the linker for packed relocations.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{Cursor, Read, Write};
use std::path::{Path, PathBuf};
use std::{env, fs};

use flate2::{Compression, write::GzEncoder};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let web = files_below(&root.join("web"), |name| !name.ends_with(".md"));
    let mut hasher = DefaultHasher::new();
    for (name, path) in &web {
        (name, read(path)).hash(&mut hasher);
    }
    write("web_files.rs", &format!("(\n\"{:016x}\",\n{},\n)\n", hasher.finish(), list(&gzipped("web", web))));
    // The pictures of pages in docs/images/pages are for reviews only.
    let docs = files_below(&root.join("docs"), |name| {
        !name.starts_with("images/pages/") && (name.ends_with(".md") || name.ends_with(".png"))
    });
    write("guide_files.rs", &format!("{}\n", list(&gzipped("docs", docs))));
    for model in ["tiny", "agent"] {
        let files = files_below(&root.join("assets").join(model), |_| true);
        write(&format!("{model}_files.rs"), &format!("{}\n", list(&gzipped(model, files))));
    }
    pack_relocations();
    write("swagger_files.rs", &format!("{}\n", list(&swagger_ui())));
}

/// Asks the linker to pack the program's relocations: 0.1 MB in place of 3. glibc reads packed ones since 2.36, so this is done only on
/// a machine that has it, and not with a linker of the user's choice (cargo-zigbuild's builds for an older glibc).
fn pack_relocations() {
    println!("cargo::rerun-if-env-changed=RUSTC_LINKER");
    let is_native =
        env::var("HOST").is_ok_and(|host| host == "x86_64-unknown-linux-gnu") && env::var("TARGET") == env::var("HOST");
    let glibc = std::process::Command::new("getconf").arg("GNU_LIBC_VERSION").output();
    let version = glibc.ok().and_then(|said| {
        let (major, minor) = std::str::from_utf8(&said.stdout).ok()?.trim().strip_prefix("glibc ")?.split_once('.')?;
        Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
    });
    if is_native && env::var_os("RUSTC_LINKER").is_none() && version.is_some_and(|version| version >= (2, 36)) {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}

/// The files of Swagger UI that the page needs, each as a gzip file around the bytes that the zip holds.
fn swagger_ui() -> BTreeMap<String, PathBuf> {
    // RFC 1952: the two magic bytes, deflate, no flags, no time, no extra flags, an unknown system.
    const HEAD: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    let archive = Cursor::new(utoipa_swagger_ui_vendored::SWAGGER_UI_VENDORED);
    let mut archive = zip::ZipArchive::new(archive).expect("the crate holds a zip");
    let mut files = BTreeMap::new();
    for index in 0..archive.len() {
        let mut file = archive.by_index_raw(index).expect("the zip can be read");
        let path = file.name().expect("names are UTF-8").into_owned();
        let Some((_, name)) = path.split_once("/dist/") else { continue };
        if !["swagger-ui-bundle.js", "swagger-ui.css"].contains(&name) || path.contains("/flavors/") {
            continue;
        }
        assert_eq!(file.compression(), zip::CompressionMethod::DEFLATE, "{path}");
        let mut gzip = HEAD.to_vec();
        file.read_to_end(&mut gzip).expect("the zip can be read");
        gzip.extend(file.crc32().to_le_bytes());
        gzip.extend((file.size() as u32).to_le_bytes());
        let place = out(&format!("{name}.gz"));
        fs::write(&place, gzip).expect("OUT_DIR can be written");
        files.insert(name.to_owned(), place);
    }
    assert_eq!(files.len(), 2, "the zip of Swagger UI has other names");
    files
}

/// Compresses files into a folder of the build.
fn gzipped(folder: &str, mut files: BTreeMap<String, PathBuf>) -> BTreeMap<String, PathBuf> {
    for (name, path) in &mut files {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(&read(path)).expect("a Vec can be written");
        let place = out(&format!("{folder}/{name}.gz"));
        fs::create_dir_all(place.parent().expect("it has a name")).expect("OUT_DIR can be written");
        fs::write(&place, encoder.finish().expect("a Vec can be written")).expect("OUT_DIR can be written");
        *path = place;
    }
    files
}

/// The files below a folder that a filter takes, by their names in it.
fn files_below(root: &Path, is_wanted: impl Fn(&str) -> bool) -> BTreeMap<String, PathBuf> {
    println!("cargo::rerun-if-changed={}", root.display());
    let (mut files, mut folders) = (BTreeMap::new(), vec![root.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.expect("the folder can be read").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(root).expect("below the folder").to_string_lossy().replace('\\', "/");
            if is_wanted(&name) {
                files.insert(name, path);
            }
        }
    }
    files
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The files as a Rust expression: an array of names and contents.
fn list(files: &BTreeMap<String, PathBuf>) -> String {
    let lines = files.iter().map(|(name, path)| format!("    ({name:?}, include_bytes!({path:?})),\n"));
    format!("&[\n{}]", lines.collect::<String>())
}

fn write(name: &str, text: &str) {
    fs::write(out(name), text).expect("OUT_DIR can be written");
}

fn out(name: &str) -> PathBuf {
    PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join(name)
}
