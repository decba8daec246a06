//! Torn sectors, for real: guests write sectors that say what they are, everything is killed at a
//! random moment, and what is left is held against what the guests were told.
//!
//! - [`oracle`]: checks of the sectors against the reports, both in the form of
//!   [`guest_tools::torn`].
//! - [`victim`]: a volume, and guests that write to it until they are killed. [`rounds`]: many of
//!   them.

mod oracle;
mod rounds;
pub mod victim;

pub use oracle::{Fault, Judgement};
pub use rounds::{Tally, Until, run_rounds, seed};
pub use victim::{Format, Interface, Moment, Setup, Victim};
