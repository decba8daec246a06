//! Boots guests and holds Foreshore against them: tests, demo, benchmarks.
