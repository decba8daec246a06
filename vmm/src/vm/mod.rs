//! A VM's life: what may be asked of it, who builds it, and the one task that owns its state.

pub mod kvm;
pub mod owner;
pub mod request;
mod run;
pub mod state;

pub use self::run::run;
