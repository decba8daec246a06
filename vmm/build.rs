//! Commit and date of the build for `--version`.

#[path = "cli/build_info.rs"]
mod build_info;

fn main() {
    build_info::emit();
}
