//! Links the agent without symbols: all of it is locked in the guest's memory, and it is copied
//! into every image.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-bins=-Wl,--strip-all");
}
