//! Commit and date of the build for `--version`.

#[path = "../../vmm/cli/build_info.rs"]
mod build_info;

fn main() {
    build_info::emit();
}
