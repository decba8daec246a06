//! pmvol.
fn main() {}
