//! Tests for torn sectors. Guests write self-describing sectors, the VMM or the host is killed at a
//! random time, and the remaining data is compared with the acknowledgments.
//!
//! - [`oracle`]: compares sectors with reports. Both have the format of [`guest_tools::torn`].
//! - [`victim`]: a volume, and guests that write to it until they are killed.
//! - [`rounds`]: many kills.

mod oracle;
mod rounds;
pub mod victim;

pub use oracle::{Classification, Fault};
pub use rounds::{Tally, Until, run_rounds, seed};
pub use victim::{Format, Interface, KillTime, Setup, Victim};
