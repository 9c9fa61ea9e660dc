//! Lists the migrations with their SQL for `src/version.rs`. sqlx's own macro could do this, but it would compile a second SQLite
//! for the build alone.

use std::fmt::Write;
use std::path::Path;

const FOLDER: &str = "../../migrations";

fn main() {
    println!("cargo::rerun-if-changed={FOLDER}");
    let folder = std::fs::canonicalize(FOLDER).expect("the folder of the database migrations can be read");
    let entries = std::fs::read_dir(folder).expect("the folder of the database migrations can be read");
    let mut files: Vec<(i64, String, String)> = entries
        .map(|entry| entry.expect("an entry of the folder of database migrations can be read").path())
        .map(|path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let parts = name.strip_suffix(".sql").and_then(|name| name.split_once('_'));
            let (version, description) = parts.unwrap_or_else(|| panic!("{name}: not NUMBER_DESCRIPTION.sql"));
            let version = version
                .parse()
                .unwrap_or_else(|_| panic!("the name of the migration {name} does not begin with a number"));
            // sqlx formats a migration's description in the same way.
            (version, description.replace('_', " "), path.display().to_string())
        })
        .collect();
    files.sort();
    let mut list = String::from("&[\n");
    for (version, description, path) in files {
        writeln!(list, "({version}, {description:?}, include_str!({path:?})),").expect("a String accepts all text");
    }
    list.push(']');
    let out = std::env::var("OUT_DIR").expect("OUT_DIR");
    std::fs::write(Path::new(&out).join("migrations.rs"), list).expect("the list of the migrations can be written");
}
