//! The PM pool behind a trait.
