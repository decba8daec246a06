//! Threads on which devices work.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::event_loop::EventLoopHandle;

/// Threads on which devices work. They stop while the VM is paused.
pub struct DeviceWork {
    state: Mutex<State>,
}

struct State {
    loops: Vec<EventLoopHandle>,
    /// Number of resumes of the VM. A pause that holds the loops late finds that the VM was
    /// resumed.
    releases: u64,
}

impl DeviceWork {
    /// Creates the set of these loops.
    pub fn new(loops: Vec<EventLoopHandle>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State { loops, releases: 0 }) })
    }

    /// Adds the loops of another device. They need no hold while the VM is paused, because the
    /// driver of the device cannot run.
    pub fn add(&self, loops: &[EventLoopHandle]) {
        self.state.lock().loops.extend_from_slice(loops);
    }

    /// Removes the loops of a device that the guest has ejected, and releases them for good.
    /// Stopping the device waits for them, even while the VM is paused.
    pub fn remove(&self, loops: &[EventLoopHandle]) {
        let mut state = self.state.lock();
        state.loops.retain(|known| !loops.iter().any(|gone| gone.is_same(known)));
        loops.iter().for_each(EventLoopHandle::dismiss);
    }

    /// Releases all loops for good, because the machine ends.
    pub fn dismiss(&self) {
        let mut state = self.state.lock();
        state.releases += 1;
        state.loops.iter().for_each(EventLoopHandle::dismiss);
    }

    /// Number of loops.
    #[cfg(any(test, feature = "testing"))]
    pub fn count(&self) -> usize {
        self.state.lock().loops.len()
    }

    /// Number of resumes of the VM.
    pub fn releases(&self) -> u64 {
        self.state.lock().releases
    }

    /// Holds all loops and waits until they have stopped, unless the VM was resumed after `since`
    /// resumes.
    pub fn hold(&self, since: u64) {
        let loops = {
            let state = self.state.lock();
            if state.releases != since {
                return;
            }
            state.loops.iter().for_each(EventLoopHandle::hold);
            state.loops.clone()
        };
        loops.iter().for_each(EventLoopHandle::wait_until_held);
    }

    pub fn release(&self) {
        let mut state = self.state.lock();
        state.releases += 1;
        state.loops.iter().for_each(EventLoopHandle::release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event_loop::EventLoop;

    #[test]
    fn device_removed_during_a_pause_can_be_stopped() {
        let [stays, goes] = ["stays", "goes"].map(|name| EventLoop::spawn(name).unwrap());
        let work = DeviceWork::new(vec![stays.handle()]);
        work.add(&[goes.handle()]);
        work.hold(work.releases());
        assert!(stays.handle().gate().is_closed() && goes.handle().gate().is_closed());
        work.remove(&[goes.handle()]);
        assert!(stays.handle().gate().is_closed() && !goes.handle().gate().is_closed());
        // The removed loop is not held any more.
        work.hold(work.releases());
        assert!(!goes.handle().gate().is_closed());
        work.release();
        assert!(!stays.handle().gate().is_closed());
    }
}
