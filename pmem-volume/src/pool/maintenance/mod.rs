//! Checks, repairs and growth of a pool.

pub(super) mod check;
pub(super) mod findings;
pub(super) mod free_content;
pub(super) mod give_up;
pub(super) mod grow;
pub(super) mod repair;
