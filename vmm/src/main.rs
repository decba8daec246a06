//! Foreshore.
fn main() {}
