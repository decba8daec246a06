//! Tests for torn sectors. Guests write self-describing sectors, the VMM or the host is killed at a
//! random time, and the remaining data is compared with the acknowledgments.
//!
//! - [`load`]: loads that make the VMM move or release chunks.
//! - [`oracle`]: compares sectors with reports. Both have the format of [`guest_tools::torn`].
//! - [`space`]: checks that no space of a thin volume is leaked.
//! - [`victim`]: a volume, and guests that write to it until they are killed.
//! - [`rounds`]: many kills.

mod load;
mod oracle;
mod rounds;
mod space;
pub mod victim;

pub use load::Load;
pub use oracle::{Classification, Fault};
pub use rounds::{Tally, Until, run_rounds, seed};
pub use victim::{Format, Interface, KillTime, Setup, Victim};
