//! Links the agent without symbols, because the whole program is locked in guest memory and copied
//! into every image. Sets the commit and the date of the build for `--version`.

#[path = "../../vmm/cli/build_info.rs"]
mod build_info;

fn main() {
    println!("cargo::rustc-link-arg-bins=-Wl,--strip-all");
    build_info::emit();
}
