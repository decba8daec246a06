//! The parts of the governor that need no device.

pub mod agentless;
pub mod audit;
pub mod decision;
pub mod episode;
pub mod held_plan;
pub mod progress;
mod status;

pub use self::status::{AgentState, ResizeStatus};
