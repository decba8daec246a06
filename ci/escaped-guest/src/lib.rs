//! A guest that has escaped runs its code in the threads of the VMM. This crate makes the system
//! calls of such code in the threads of an unmodified VMM, with ptrace(2), and checks which of them
//! succeed. The filters of a thread apply to calls that a tracer lets it make.

mod attempts;
mod ring;
mod system_calls;
pub mod threads;
mod traced_thread;

pub use attempts::{
    ATTEMPTS, Attempt, Confinement, REFUSED, Targets, check_attempts,
    check_attempts_without_limits, execute_program,
};
pub use ring::open_through_ring_of_disk;
pub use traced_thread::TracedThread;
