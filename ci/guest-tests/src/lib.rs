//! Boots guests and holds Foreshore against them: tests, demo, benchmarks.

pub mod shell_protocol;
