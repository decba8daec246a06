//! A thread that waits for file descriptors on behalf of devices.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{Builder, JoinHandle};

use event_manager::{
    EventManager, EventOps, EventSet, Events, MutEventSubscriber, RemoteEndpoint, SubscriberId,
};
use parking_lot::{Condvar, Mutex};
use thiserror::Error;
use tracing::error;

use crate::log::sparsely;

/// What a device registers: the owner of its queues and file descriptors.
pub type Subscriber = Box<dyn MutEventSubscriber + Send>;

/// Why an event loop cannot do what it was asked.
#[derive(Debug, Error)]
pub enum EventLoopError {
    #[error("Cannot create the event loop {name:?}")]
    Create {
        /// The loop's thread name.
        name: String,
        /// What event-manager says.
        #[source]
        source: event_manager::Error,
    },
    #[error("Cannot start the thread of event loop {name:?}")]
    Spawn {
        /// The loop's thread name.
        name: String,
        /// What the operating system says.
        #[source]
        source: io::Error,
    },
    #[error("The event loop has ended")]
    Ended(#[source] event_manager::Error),
}

/// An event loop with its thread. Dropping it ends the thread and drops all subscribers.
pub struct EventLoop {
    handle: EventLoopHandle,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Adds and removes subscribers, and holds the loop, from any thread but the loop's own.
#[derive(Clone)]
pub struct EventLoopHandle {
    endpoint: RemoteEndpoint<Subscriber>,
    gate: Arc<Gate>,
}

/// What works for a loop's subscriber and is no thread of this process, as a driver of the host's
/// kernel. It stands still while the loop does; both calls come on the loop's thread.
pub trait Helper: Send + Sync {
    /// When this returns it does nothing any more.
    fn stand_still(&self);
    /// It may go on.
    fn go_on(&self);
}

/// Where a loop's thread stands still, between two events, while it is held.
#[derive(Default)]
pub struct Gate {
    /// The thread stands at the gate, or has ended.
    is_held: Mutex<bool>,
    changed: Condvar,
    is_closed: AtomicBool,
    is_busy: AtomicBool,
    /// Subscribers are taken back, and nothing else is to happen.
    is_dismissed: AtomicBool,
    helpers: Mutex<Vec<Weak<dyn Helper>>>,
}

impl Gate {
    /// From now on `helper` stands still with the loop, for as long as there is one.
    pub fn add_helper(&self, helper: Weak<dyn Helper>) {
        let mut helpers = self.helpers.lock();
        helpers.retain(|known| known.strong_count() > 0);
        helpers.push(helper);
    }

    fn helpers(&self) -> Vec<Arc<dyn Helper>> {
        self.helpers.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Whether the loop is to stand still: what is begun now keeps it from that.
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Says whether the subscriber of this loop has something under way that is to end before the
    /// loop stands still. Called on the loop's thread.
    pub fn set_busy(&self, is_busy: bool) {
        self.is_busy.store(is_busy, Ordering::Relaxed);
    }

    /// Whether it was said so.
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

    /// Stands still while the gate is closed, unless the loop is busy or shall end.
    fn pass(&self, stop: &AtomicBool) {
        let mut is_held = self.is_held.lock();
        let mut standing = Vec::new();
        while self.is_closed()
            && !self.is_busy.load(Ordering::Relaxed)
            && !stop.load(Ordering::Acquire)
        {
            if !*is_held {
                standing = self.helpers();
                standing.iter().for_each(|helper| helper.stand_still());
            }
            *is_held = true;
            self.changed.notify_all();
            self.changed.wait(&mut is_held);
        }
        // What is about to be given up begins nothing any more.
        if !self.is_over(stop) {
            standing.iter().for_each(|helper| helper.go_on());
        }
        *is_held = false;
    }
}

/// Nobody waits for a thread that has ended.
struct HeldForGood(Arc<Gate>);

impl Drop for HeldForGood {
    fn drop(&mut self) {
        *self.0.is_held.lock() = true;
        self.0.changed.notify_all();
    }
}

impl EventLoop {
    /// Starts a thread called `name` (at most 15 bytes are shown by the kernel).
    pub fn spawn(name: &str) -> Result<Self, EventLoopError> {
        let create = |source| EventLoopError::Create { name: name.to_owned(), source };
        let mut manager = EventManager::<Subscriber>::new().map_err(create)?;
        let handle = EventLoopHandle { endpoint: manager.remote_endpoint(), gate: Arc::default() };
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, gate) = (Arc::clone(&stop), Arc::clone(&handle.gate));
        let thread = Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                let _held = HeldForGood(Arc::clone(&gate));
                while !stopped.load(Ordering::Acquire) {
                    gate.pass(&stopped);
                    if let Err(err) = manager.run() {
                        // Subscribers handle their own errors: this is epoll itself failing.
                        error!(%err, "Event loop cannot wait");
                        break;
                    }
                }
            })
            .map_err(|source| EventLoopError::Spawn { name: name.to_owned(), source })?;
        Ok(Self { handle, stop, thread: Some(thread) })
    }

    /// A handle for whoever registers subscribers.
    pub fn handle(&self) -> EventLoopHandle {
        self.handle.clone()
    }
}

impl Drop for EventLoop {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.handle.release();
        // A failed kick means that the thread has ended already.
        let _ = self.handle.endpoint.kick();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            error!("An event loop's thread panicked");
        }
    }
}

impl EventLoopHandle {
    /// Has the loop stand still before its next event, and when what is under way has ended. Until
    /// it is released nobody may wait for it to add or remove subscribers.
    pub fn hold(&self) {
        self.gate.set_closed(true);
        // A failed kick means that the thread has ended.
        let _ = self.endpoint.kick();
    }

    /// Waits until the loop stands still, or has been released.
    pub fn wait_until_held(&self) {
        let mut is_held = self.gate.is_held.lock();
        while self.gate.is_closed() && !*is_held {
            self.gate.changed.wait(&mut is_held);
        }
    }

    /// Lets it go on.
    pub fn release(&self) {
        self.gate.set_closed(false);
    }

    /// Lets it go on for good, so that its subscribers can be taken back. Its helpers do not: what
    /// stands still stays so.
    pub fn dismiss(&self) {
        self.gate.dismiss();
    }

    /// Whether both are of one loop.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.gate, &other.gate)
    }

    /// For subscribers that have something under way when they return.
    pub fn gate(&self) -> Arc<Gate> {
        Arc::clone(&self.gate)
    }

    /// Registers `subscriber`; its `init` has run when this returns. Must not be called on the
    /// loop's thread.
    pub fn add(&self, subscriber: Subscriber) -> Result<SubscriberId, EventLoopError> {
        self.endpoint
            .call_blocking::<_, _, event_manager::Error>(move |manager| {
                Ok(manager.add_subscriber(subscriber))
            })
            .map_err(EventLoopError::Ended)
    }

    /// Takes a subscriber back; after that the loop touches nothing of it. Must not be called on
    /// the loop's thread.
    pub fn remove(&self, id: SubscriberId) -> Result<Subscriber, EventLoopError> {
        self.endpoint
            .call_blocking::<_, _, event_manager::Error>(move |manager| {
                manager.remove_subscriber(id)
            })
            .map_err(EventLoopError::Ended)
    }
}

/// A file that a subscriber waits for at times only: while it does not, a file that is ready would
/// keep the loop busy.
pub struct Interest {
    what: &'static str,
    data: u32,
    set: EventSet,
    /// It is waited for.
    on: bool,
}

impl Interest {
    /// Will wait for `set`, which comes as `data`. Log lines call the file `what`.
    pub fn new(what: &'static str, data: u32, set: EventSet) -> Self {
        Self { what, data, set, on: false }
    }

    /// Whether the file is waited for.
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// Begins or ends waiting for `file`, which is the same one until waiting has ended. Where it
    /// cannot begin, the next call tries again. Where it cannot end, the file is not waited for
    /// at all: epoll does not know it, and whoever went on as if it were would wait for ever.
    pub fn set(&mut self, on: bool, file: &impl AsRawFd, ops: &mut EventOps) {
        if on == self.on {
            return;
        }
        let event = Events::with_data_raw(file.as_raw_fd(), self.data, self.set);
        if on {
            match ops.add(event) {
                Ok(()) => self.on = true,
                Err(err) => sparsely!(warn, ?err, file = self.what, "Cannot begin to wait"),
            }
        } else {
            self.on = false;
            if let Err(err) = ops.remove(event) {
                sparsely!(error, ?err, file = self.what, "Cannot end waiting");
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
        seen: mpsc::Sender<u64>,
    }

    impl MutEventSubscriber for Counter {
        fn init(&mut self, ops: &mut EventOps) {
            ops.add(Events::new(&self.fd, EventSet::IN)).unwrap();
        }
        fn process(&mut self, _: Events, _: &mut EventOps) {
            self.seen.send(self.fd.read().unwrap()).unwrap();
        }
    }

    /// Does something with its file descriptors, once.
    struct Once<F>(F);

    impl<F: FnMut(&mut EventOps)> MutEventSubscriber for Once<F> {
        fn init(&mut self, ops: &mut EventOps) {
            (self.0)(ops);
        }
        fn process(&mut self, _: Events, _: &mut EventOps) {}
    }

    #[test]
    fn an_interest_that_cannot_begin_or_end_is_off() {
        let fd = EventFd::new(EFD_NONBLOCK).unwrap();
        let never_added = EventFd::new(EFD_NONBLOCK).unwrap();
        let regular = tempfile::tempfile().unwrap();
        let mut interest = Interest::new("a test's file", 1, EventSet::IN);
        let mut seen = Vec::new();
        let mut manager = EventManager::new().unwrap();
        manager.add_subscriber(Once(|ops: &mut EventOps| {
            // epoll takes no regular file.
            interest.set(true, &regular, ops);
            seen.push(interest.is_on());
            interest.set(true, &fd, ops);
            seen.push(interest.is_on());
            interest.set(false, &never_added, ops);
            seen.push(interest.is_on());
        }));
        drop(manager);
        assert_eq!(seen, [false, true, false]);
    }

    /// Takes its time: says that it has an event, and waits until it may go on.
    struct Slow {
        fd: EventFd,
        gate: Arc<Gate>,
        steps: mpsc::SyncSender<()>,
    }

    impl MutEventSubscriber for Slow {
        fn init(&mut self, ops: &mut EventOps) {
            ops.add(Events::new(&self.fd, EventSet::IN)).unwrap();
        }
        /// An event of 2 is the first half of something, and one of 1 the second.
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
    fn a_loop_is_held_when_its_event_is_over_and_what_that_began() {
        let event_loop = EventLoop::spawn("test").unwrap();
        let (handle, fd) = (event_loop.handle(), EventFd::new(EFD_NONBLOCK).unwrap());
        let (steps, seen) = mpsc::sync_channel(0);
        let slow = Slow { fd: fd.try_clone().unwrap(), gate: handle.gate(), steps };
        handle.add(Box::new(slow)).unwrap();
        // 1. It is at an event when it is to stand still.
        fd.write(2).unwrap();
        seen.recv().unwrap();
        handle.hold();
        assert!(!is_held(&handle));
        seen.recv().unwrap();
        // 2. The event has begun something, whose end comes as another one.
        fd.write(1).unwrap();
        seen.recv().unwrap();
        assert!(!is_held(&handle));
        seen.recv().unwrap();
        handle.wait_until_held();
        // 3. What comes now is for later.
        fd.write(1).unwrap();
        assert!(is_held(&handle) && seen.try_recv().is_err());
        handle.release();
        seen.recv().unwrap();
        seen.recv().unwrap();
        assert!(!is_held(&handle));
        // 4. Who waits in vain is not kept waiting.
        handle.wait_until_held();
        handle.hold();
        drop(event_loop);
        handle.hold();
        handle.wait_until_held();
    }

    struct Watched(Mutex<Vec<&'static str>>);

    impl Helper for Watched {
        fn stand_still(&self) {
            self.0.lock().push("stands");
        }
        fn go_on(&self) {
            self.0.lock().push("goes on");
        }
    }

    #[test]
    fn a_helper_stands_still_as_long_as_its_loop() {
        let event_loop = EventLoop::spawn("test").unwrap();
        let (handle, helper) = (event_loop.handle(), Arc::new(Watched(Mutex::default())));
        let weak: Weak<Watched> = Arc::downgrade(&helper);
        handle.gate().add_helper(weak);
        for _ in 0..2 {
            handle.hold();
            handle.hold();
            handle.wait_until_held();
            assert_eq!(*helper.0.lock(), ["stands"]);
            handle.release();
            while is_held(&handle) {
                thread::yield_now();
            }
            assert_eq!(std::mem::take(&mut *helper.0.lock()), ["stands", "goes on"]);
        }
        // One that has gone is nobody's.
        drop(helper);
        handle.hold();
        handle.wait_until_held();
        handle.hold();
        drop(event_loop);
    }

    #[test]
    fn a_helper_of_a_loop_that_is_dismissed_stays_where_it_is() {
        let event_loop = EventLoop::spawn("test").unwrap();
        let (handle, helper) = (event_loop.handle(), Arc::new(Watched(Mutex::default())));
        let weak: Weak<Watched> = Arc::downgrade(&helper);
        handle.gate().add_helper(weak);
        let (seen, _) = mpsc::channel();
        let id = handle
            .add(Box::new(Counter { fd: EventFd::new(EFD_NONBLOCK).unwrap(), seen }))
            .unwrap();
        handle.hold();
        handle.wait_until_held();
        handle.dismiss();
        // The loop's thread answers that, and so has gone on.
        handle.remove(id).unwrap();
        assert_eq!(*helper.0.lock(), ["stands"]);
    }

    #[test]
    fn a_subscriber_is_served_until_it_is_removed() {
        let event_loop = EventLoop::spawn("test").unwrap();
        let fd = EventFd::new(EFD_NONBLOCK).unwrap();
        let (seen, counts) = mpsc::channel();
        let subscriber = Counter { fd: fd.try_clone().unwrap(), seen };
        let id = event_loop.handle().add(Box::new(subscriber)).unwrap();
        fd.write(3).unwrap();
        assert_eq!(counts.recv().unwrap(), 3);
        drop(event_loop.handle().remove(id).unwrap());
        fd.write(1).unwrap();
        // The subscriber owned the only sender: gone means that nothing can serve the event any
        // more.
        assert!(counts.recv().is_err());
        assert!(event_loop.handle().remove(id).is_err());
    }
}
