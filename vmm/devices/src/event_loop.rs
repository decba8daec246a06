//! Event loop: a thread that waits for file descriptors of devices.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use event_manager::{
    EventManager, EventOps, EventSet, Events, MutEventSubscriber, RemoteEndpoint, SubscriberId,
};
use foreshore_confinement::thread::{ThreadKind, spawn_confined};
use parking_lot::{Condvar, Mutex};
use thiserror::Error;
use tracing::error;

use crate::log::rate_limited;

/// Owner of a device's queues and file descriptors.
pub type Subscriber = Box<dyn MutEventSubscriber + Send>;

#[derive(Debug, Error)]
pub enum EventLoopError {
    #[error("cannot create event loop {name:?}")]
    Create {
        name: String,
        #[source]
        source: event_manager::Error,
    },
    #[error("cannot start the thread of event loop {name:?}")]
    Spawn {
        name: String,
        #[source]
        source: io::Error,
    },
    #[error("event loop has ended")]
    Ended(#[source] event_manager::Error),
}

/// Event loop with its own thread. Dropping it ends the thread and drops all subscribers.
pub struct EventLoop {
    handle: EventLoopHandle,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Handle to an event loop. The handle adds and removes subscribers, and holds the loop. Any thread
/// except the loop's own may use it.
#[derive(Clone)]
pub struct EventLoopHandle {
    endpoint: RemoteEndpoint<Subscriber>,
    gate: Arc<Gate>,
}

/// Helper of a subscriber that is not a thread of this process, for example a driver in the host's
/// kernel. The helper is stopped while the loop is held. Both functions are called on the loop's
/// thread.
pub trait Helper: Send + Sync {
    /// Stops the helper. When this returns, the helper is idle.
    fn quiesce(&self);
    /// Resumes the helper.
    fn resume(&self);
}

/// Gate at which a loop's thread stops, between two events, while the loop is held.
#[derive(Default)]
pub struct Gate {
    /// Set if the thread waits at the gate or has ended.
    is_held: Mutex<bool>,
    changed: Condvar,
    is_closed: AtomicBool,
    is_busy: AtomicBool,
    /// Set if subscribers are being removed. No other work may start then.
    is_dismissed: AtomicBool,
    helpers: Mutex<Vec<Weak<dyn Helper>>>,
}

impl Gate {
    /// Adds a helper. It is stopped and resumed together with the loop, until the helper is
    /// dropped.
    pub fn add_helper(&self, helper: Weak<dyn Helper>) {
        let mut helpers = self.helpers.lock();
        helpers.retain(|known| known.strong_count() > 0);
        helpers.push(helper);
    }

    fn helpers(&self) -> Vec<Arc<dyn Helper>> {
        self.helpers.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Returns true if the loop was requested to stop. Starting new work would delay the stop.
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Records whether the subscriber has work in progress that must end before the loop stops.
    /// Call this on the loop's thread.
    pub fn set_busy(&self, is_busy: bool) {
        self.is_busy.store(is_busy, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub fn is_busy(&self) -> bool {
        self.is_busy.load(Ordering::Relaxed)
    }

    fn set_closed(&self, is_closed: bool) {
        let _is_held = self.is_held.lock();
        self.is_closed.store(is_closed, Ordering::Release);
        self.changed.notify_all();
    }

    fn dismiss(&self) {
        let _is_held = self.is_held.lock();
        self.is_dismissed.store(true, Ordering::Release);
        self.is_closed.store(false, Ordering::Release);
        self.changed.notify_all();
    }

    fn is_over(&self, stop: &AtomicBool) -> bool {
        stop.load(Ordering::Acquire) || self.is_dismissed.load(Ordering::Acquire)
    }

    /// Waits while the gate is closed, unless the loop is busy or about to end.
    fn pass(&self, stop: &AtomicBool) {
        let mut is_held = self.is_held.lock();
        let mut quiesced = Vec::new();
        while self.is_closed()
            && !self.is_busy.load(Ordering::Relaxed)
            && !stop.load(Ordering::Acquire)
        {
            if !*is_held {
                quiesced = self.helpers();
                quiesced.iter().for_each(|helper| helper.quiesce());
            }
            *is_held = true;
            self.changed.notify_all();
            self.changed.wait(&mut is_held);
        }
        // If the loop ends, its helpers remain stopped.
        if !self.is_over(stop) {
            quiesced.iter().for_each(|helper| helper.resume());
        }
        *is_held = false;
    }
}

/// Marks the loop as held when its thread ends, so that no thread waits for it.
struct HoldOnExit(Arc<Gate>);

impl Drop for HoldOnExit {
    fn drop(&mut self) {
        *self.0.is_held.lock() = true;
        self.0.changed.notify_all();
    }
}

impl EventLoop {
    /// Starts a loop on a new thread of this kind. The kernel keeps at most 15 bytes of `name`.
    pub fn spawn(kind: ThreadKind, name: &str) -> Result<Self, EventLoopError> {
        let create = |source| EventLoopError::Create { name: name.to_owned(), source };
        let mut manager = EventManager::<Subscriber>::new().map_err(create)?;
        let handle = EventLoopHandle { endpoint: manager.remote_endpoint(), gate: Arc::default() };
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, gate) = (Arc::clone(&stop), Arc::clone(&handle.gate));
        let thread = spawn_confined(kind, name, move || {
            let _held = HoldOnExit(Arc::clone(&gate));
            while !stopped.load(Ordering::Acquire) {
                gate.pass(&stopped);
                if let Err(err) = manager.run() {
                    // Subscribers handle their own errors, so this is an error of epoll itself.
                    let name = std::thread::current().name().unwrap_or_default().to_owned();
                    error!(
                        thread = name,
                        %err,
                        "Event loop cannot wait for events, so its devices stop; restart the VM"
                    );
                    break;
                }
            }
        });
        let thread =
            thread.map_err(|source| EventLoopError::Spawn { name: name.to_owned(), source })?;
        Ok(Self { handle, stop, thread: Some(thread) })
    }

    pub fn handle(&self) -> EventLoopHandle {
        self.handle.clone()
    }
}

impl Drop for EventLoop {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.handle.release();
        // A failed kick means that the thread has already ended.
        let _ = self.handle.endpoint.kick();
        if let Some(thread) = self.thread.take() {
            let name = thread.thread().name().unwrap_or_default().to_owned();
            if thread.join().is_err() {
                error!(thread = name, "Thread of an event loop panicked");
            }
        }
    }
}

impl EventLoopHandle {
    /// Stops the loop before its next event, after work in progress has ended. Do not add or remove
    /// subscribers until the loop is released, because this would wait for the loop.
    pub fn hold(&self) {
        self.gate.set_closed(true);
        // A failed kick means that the thread has ended.
        let _ = self.endpoint.kick();
    }

    /// Waits until the loop is held or was released.
    pub fn wait_until_held(&self) {
        let mut is_held = self.gate.is_held.lock();
        while self.gate.is_closed() && !*is_held {
            self.gate.changed.wait(&mut is_held);
        }
    }

    /// Resumes the loop.
    pub fn release(&self) {
        self.gate.set_closed(false);
    }

    /// Resumes the loop permanently, so that its subscribers can be removed. Its helpers remain
    /// stopped.
    pub fn dismiss(&self) {
        self.gate.dismiss();
    }

    /// Returns true if both handles belong to the same loop.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.gate, &other.gate)
    }

    /// Gate of the loop, for subscribers whose work continues after they return.
    pub fn gate(&self) -> Arc<Gate> {
        Arc::clone(&self.gate)
    }

    /// Registers `subscriber`. When this returns, its `init` has run. Must not be called on the
    /// loop's thread.
    pub fn add(&self, subscriber: Subscriber) -> Result<SubscriberId, EventLoopError> {
        self.endpoint
            .call_blocking::<_, _, event_manager::Error>(move |manager| {
                Ok(manager.add_subscriber(subscriber))
            })
            .map_err(EventLoopError::Ended)
    }

    /// Removes and returns a subscriber. The loop no longer uses it. Must not be called on the
    /// loop's thread.
    pub fn remove(&self, id: SubscriberId) -> Result<Subscriber, EventLoopError> {
        self.endpoint
            .call_blocking::<_, _, event_manager::Error>(move |manager| {
                manager.remove_subscriber(id)
            })
            .map_err(EventLoopError::Ended)
    }

    /// Same as [`EventLoopHandle::remove`], but drops the subscriber on the loop's thread. Use this
    /// if the drop needs system calls that the caller, for example a vCPU, may not
    /// make.
    pub fn remove_and_drop(&self, id: SubscriberId) -> Result<(), EventLoopError> {
        self.endpoint
            .call_blocking::<_, _, event_manager::Error>(move |manager| {
                manager.remove_subscriber(id).map(drop)
            })
            .map_err(EventLoopError::Ended)
    }
}

/// File that is registered with epoll only while its subscriber waits for it. Otherwise a ready
/// file would keep the loop busy.
pub struct Interest {
    name: &'static str,
    data: u32,
    set: EventSet,
    /// Set if the file is registered.
    on: bool,
}

impl Interest {
    /// Creates an unregistered interest in the events `set`, which are reported with `data`. Log
    /// lines refer to the file as `name`.
    pub fn new(name: &'static str, data: u32, set: EventSet) -> Self {
        Self { name, data, set, on: false }
    }

    pub fn is_on(&self) -> bool {
        self.on
    }

    /// Registers or unregisters `file`. It must be the same file until it is unregistered. If
    /// registration fails, the next call retries. If unregistration fails, epoll does not know the
    /// file, so the file counts as unregistered. A caller that assumed otherwise would wait
    /// forever.
    pub fn set(&mut self, on: bool, file: &impl AsRawFd, ops: &mut EventOps) {
        if on == self.on {
            return;
        }
        let event = Events::with_data_raw(file.as_raw_fd(), self.data, self.set);
        if on {
            match ops.add(event) {
                Ok(()) => self.on = true,
                Err(err) => {
                    rate_limited!(warn, ?err, file = self.name, "Cannot watch a file for events")
                }
            }
        } else {
            self.on = false;
            if let Err(err) = ops.remove(event) {
                rate_limited!(error, ?err, file = self.name, "Cannot stop watching a file");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use event_manager::SubscriberOps;
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    use super::*;

    struct Counter {
        fd: EventFd,
        events: mpsc::Sender<u64>,
    }

    impl MutEventSubscriber for Counter {
        fn init(&mut self, ops: &mut EventOps) {
            ops.add(Events::new(&self.fd, EventSet::IN)).unwrap();
        }
        fn process(&mut self, _: Events, _: &mut EventOps) {
            self.events.send(self.fd.read().unwrap()).unwrap();
        }
    }

    /// Subscriber that calls a function once, with event operations.
    struct Once<F>(F);

    impl<F: FnMut(&mut EventOps)> MutEventSubscriber for Once<F> {
        fn init(&mut self, ops: &mut EventOps) {
            (self.0)(ops);
        }
        fn process(&mut self, _: Events, _: &mut EventOps) {}
    }

    #[test]
    fn interest_is_off_after_a_failure() {
        let fd = EventFd::new(EFD_NONBLOCK).unwrap();
        let never_added = EventFd::new(EFD_NONBLOCK).unwrap();
        let regular = tempfile::tempfile().unwrap();
        let mut interest = Interest::new("a test's file", 1, EventSet::IN);
        let mut events = Vec::new();
        let mut manager = EventManager::new().unwrap();
        manager.add_subscriber(Once(|ops: &mut EventOps| {
            // epoll does not accept regular files.
            interest.set(true, &regular, ops);
            events.push(interest.is_on());
            interest.set(true, &fd, ops);
            events.push(interest.is_on());
            interest.set(false, &never_added, ops);
            events.push(interest.is_on());
        }));
        drop(manager);
        assert_eq!(events, [false, true, false]);
    }

    /// Slow subscriber. It reports each event, and then waits for permission to continue.
    struct Slow {
        fd: EventFd,
        gate: Arc<Gate>,
        steps: mpsc::SyncSender<()>,
    }

    impl MutEventSubscriber for Slow {
        fn init(&mut self, ops: &mut EventOps) {
            ops.add(Events::new(&self.fd, EventSet::IN)).unwrap();
        }
        /// An event with value 2 starts an operation, and an event with value 1 ends it.
        fn process(&mut self, _: Events, _: &mut EventOps) {
            let count = self.fd.read().unwrap();
            self.steps.send(()).unwrap();
            self.steps.send(()).unwrap();
            self.gate.set_busy(count == 2);
        }
    }

    fn is_held(handle: &EventLoopHandle) -> bool {
        *handle.gate.is_held.lock()
    }

    #[test]
    fn loop_is_held_after_its_event_and_operation_end() {
        let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
        let (handle, fd) = (event_loop.handle(), EventFd::new(EFD_NONBLOCK).unwrap());
        let (steps, events) = mpsc::sync_channel(0);
        let slow = Slow { fd: fd.try_clone().unwrap(), gate: handle.gate(), steps };
        handle.add(Box::new(slow)).unwrap();
        // 1. Hold the loop while it handles an event.
        fd.write(2).unwrap();
        events.recv().unwrap();
        handle.hold();
        assert!(!is_held(&handle));
        events.recv().unwrap();
        // 2. The event has started an operation, which another event ends.
        fd.write(1).unwrap();
        events.recv().unwrap();
        assert!(!is_held(&handle));
        events.recv().unwrap();
        handle.wait_until_held();
        // 3. Later events wait.
        fd.write(1).unwrap();
        assert!(is_held(&handle) && events.try_recv().is_err());
        handle.release();
        events.recv().unwrap();
        events.recv().unwrap();
        assert!(!is_held(&handle));
        // 4. A wait returns immediately if the loop is not held or has ended.
        handle.wait_until_held();
        handle.hold();
        drop(event_loop);
        handle.hold();
        handle.wait_until_held();
    }

    struct Watched(Mutex<Vec<&'static str>>);

    impl Helper for Watched {
        fn quiesce(&self) {
            self.0.lock().push("stopped");
        }
        fn resume(&self) {
            self.0.lock().push("continued");
        }
    }

    #[test]
    fn helper_stops_with_its_loop() {
        let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
        let (handle, helper) = (event_loop.handle(), Arc::new(Watched(Mutex::default())));
        let weak: Weak<Watched> = Arc::downgrade(&helper);
        handle.gate().add_helper(weak);
        for _ in 0..2 {
            handle.hold();
            handle.hold();
            handle.wait_until_held();
            assert_eq!(*helper.0.lock(), ["stopped"]);
            handle.release();
            while is_held(&handle) {
                thread::yield_now();
            }
            assert_eq!(std::mem::take(&mut *helper.0.lock()), ["stopped", "continued"]);
        }
        // A dropped helper is not called.
        drop(helper);
        handle.hold();
        handle.wait_until_held();
        handle.hold();
        drop(event_loop);
    }

    #[test]
    fn helper_of_a_dismissed_loop_stays_stopped() {
        let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
        let (handle, helper) = (event_loop.handle(), Arc::new(Watched(Mutex::default())));
        let weak: Weak<Watched> = Arc::downgrade(&helper);
        handle.gate().add_helper(weak);
        let (events, _) = mpsc::channel();
        let id = handle
            .add(Box::new(Counter { fd: EventFd::new(EFD_NONBLOCK).unwrap(), events }))
            .unwrap();
        handle.hold();
        handle.wait_until_held();
        handle.dismiss();
        // The loop's thread responds, so it has resumed.
        handle.remove(id).unwrap();
        assert_eq!(*helper.0.lock(), ["stopped"]);
    }

    #[test]
    fn subscriber_is_served_until_removed() {
        let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
        let fd = EventFd::new(EFD_NONBLOCK).unwrap();
        let (events, counts) = mpsc::channel();
        let subscriber = Counter { fd: fd.try_clone().unwrap(), events };
        let id = event_loop.handle().add(Box::new(subscriber)).unwrap();
        fd.write(3).unwrap();
        assert_eq!(counts.recv().unwrap(), 3);
        drop(event_loop.handle().remove(id).unwrap());
        fd.write(1).unwrap();
        // The subscriber owned the only sender. The closed channel proves that the event can no
        // longer be handled.
        assert!(counts.recv().is_err());
        assert!(event_loop.handle().remove(id).is_err());
    }
}
