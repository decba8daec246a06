//! Links the agent without symbols, because all of it is locked in the guest's memory and copied
//! into every image.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-bins=-Wl,--strip-all");
}
