//! Links the agent without symbols, because all of it is locked in the guest's memory and copied
//! into every image. Sets commit and date of the build for `--version`.

#[path = "../../vmm/cli/build_info.rs"]
mod build_info;

fn main() {
    println!("cargo::rustc-link-arg-bins=-Wl,--strip-all");
    build_info::emit();
}
