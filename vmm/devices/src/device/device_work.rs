//! Threads on which devices work.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::event_loop::EventLoopHandle;

/// Event loops on whose threads devices work. While the VM is paused, they are held
/// ([`EventLoopHandle::hold`]).
pub struct DeviceWork {
    state: Mutex<State>,
}

struct State {
    loops: Vec<EventLoopHandle>,
    /// Number of times that the VM was resumed. If the number has changed before a pause holds the
    /// loops, the VM was resumed in the meantime, and the pause is obsolete.
    releases: u64,
}

impl DeviceWork {
    /// Creates a set of event loops.
    pub fn new(loops: Vec<EventLoopHandle>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State { loops, releases: 0 }) })
    }

    /// Adds the event loops of another device. If the VM is paused, they need not be held, because
    /// the device's driver cannot run.
    pub fn add(&self, loops: &[EventLoopHandle]) {
        self.state.lock().loops.extend_from_slice(loops);
    }

    /// Removes the event loops of a device that the guest has ejected, and releases them
    /// permanently, because stopping the device waits for them even while the VM is paused.
    pub fn remove(&self, loops: &[EventLoopHandle]) {
        let mut state = self.state.lock();
        state.loops.retain(|known| !loops.iter().any(|gone| gone.is_same(known)));
        loops.iter().for_each(EventLoopHandle::dismiss);
    }

    /// Releases all loops permanently. Called when the machine ends.
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

    /// Number of times that the VM was resumed.
    pub fn releases(&self) -> u64 {
        self.state.lock().releases
    }

    /// Holds all loops and waits until they have stopped. Does nothing if the VM was resumed since
    /// [`Self::releases`] returned `since`.
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
    use foreshore_confinement::thread::ThreadKind;

    use super::*;
    use crate::event_loop::EventLoop;

    #[test]
    fn device_removed_during_a_pause_can_be_stopped() {
        let [stays, goes] =
            ["stays", "goes"].map(|name| EventLoop::spawn(ThreadKind::Device, name).unwrap());
        let work = DeviceWork::new(vec![stays.handle()]);
        work.add(&[goes.handle()]);
        work.hold(work.releases());
        assert!(stays.handle().gate().is_closed() && goes.handle().gate().is_closed());
        work.remove(&[goes.handle()]);
        assert!(stays.handle().gate().is_closed() && !goes.handle().gate().is_closed());
        // The removed loop is no longer held.
        work.hold(work.releases());
        assert!(!goes.handle().gate().is_closed());
        work.release();
        assert!(!stays.handle().gate().is_closed());
    }
}
