//! Checks, repairs and growth of a pool.

pub(super) mod check;
pub(super) mod discard_damaged;
pub(super) mod grow;
pub(super) mod repair;
