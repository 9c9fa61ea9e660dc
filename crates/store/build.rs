//! sqlx embeds the migrations, and would not see a new file.

fn main() {
    println!("cargo::rerun-if-changed=../../migrations");
}
