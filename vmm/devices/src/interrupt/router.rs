//! Delivery of MSI messages through KVM, either by an irqfd with its own route or directly.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use thiserror::Error;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::MsiController;
use crate::memory::layout::FIRST_MSI_GSI;
use crate::pci::msix::MsiMessage;

/// Maximum number of routes in KVM (KVM_MAX_IRQ_ROUTES). Each GSI needs one route.
const GSI_END: u32 = 4096;

#[derive(Debug, Error)]
pub enum RouteError {
    #[error("all {GSI_END} interrupt routes of KVM are in use")]
    Full,
    #[error("cannot create the eventfd of GSI {gsi}")]
    EventFd {
        gsi: u32,
        #[source]
        source: io::Error,
    },
    #[error("KVM refused the route of GSI {gsi}")]
    Route {
        gsi: u32,
        #[source]
        source: io::Error,
    },
    #[error("KVM refused the irqfd of GSI {gsi}")]
    Irqfd {
        gsi: u32,
        #[source]
        source: io::Error,
    },
}

struct Routes {
    /// Message of each GSI.
    messages: BTreeMap<u32, MsiMessage>,
    /// GSIs that were freed and can be reused.
    free: Vec<u32>,
    /// Smallest GSI that was never allocated.
    next: u32,
}

/// Owner of the VM's table of MSI routes.
pub struct MsiRouter {
    controller: Arc<dyn MsiController>,
    routes: Mutex<Routes>,
}

impl MsiRouter {
    /// Creates a router without routes.
    pub fn new(controller: Arc<dyn MsiController>) -> Arc<Self> {
        let routes = Routes { messages: BTreeMap::new(), free: Vec::new(), next: FIRST_MSI_GSI };
        Arc::new(Self { controller, routes: Mutex::new(routes) })
    }

    /// Delivers `message` before this returns.
    pub fn send(&self, message: MsiMessage) -> io::Result<()> {
        self.controller.signal_msi(message)
    }

    /// Creates an irqfd that delivers `message`.
    pub fn connect(self: &Arc<Self>, message: MsiMessage) -> Result<MsiLine, RouteError> {
        self.connect_irqfd(|| EventFd::new(EFD_NONBLOCK), message)
    }

    /// Same as [`Self::connect`], but uses a copy of an event that another component also raises.
    pub fn connect_event(
        self: &Arc<Self>,
        event: &EventFd,
        message: MsiMessage,
    ) -> Result<MsiLine, RouteError> {
        self.connect_irqfd(|| event.try_clone(), message)
    }

    /// Number of GSIs that have a message.
    #[cfg(any(test, feature = "testing"))]
    pub fn used(&self) -> usize {
        self.routes.lock().messages.len()
    }

    fn connect_irqfd(
        self: &Arc<Self>,
        irqfd: impl FnOnce() -> io::Result<EventFd>,
        message: MsiMessage,
    ) -> Result<MsiLine, RouteError> {
        let mut line = MsiLine::allocate(self, irqfd)?;
        let gsi = line.gsi;
        // The route must exist first, because registering an irqfd looks it up.
        self.route(gsi, message)?;
        line.message = message;
        self.controller
            .register_irqfd(&line.irqfd, gsi)
            .map_err(|source| RouteError::Irqfd { gsi, source })?;
        line.registered = true;
        Ok(line)
    }

    fn route(&self, gsi: u32, message: MsiMessage) -> Result<(), RouteError> {
        let mut routes = self.routes.lock();
        let before = routes.messages.insert(gsi, message);
        self.controller.set_msi_routes(&routes.messages).map_err(|source| {
            // After a failure, KVM keeps its old table, so the entry here is restored as well.
            match before {
                Some(before) => routes.messages.insert(gsi, before),
                None => routes.messages.remove(&gsi),
            };
            RouteError::Route { gsi, source }
        })
    }
}

/// GSI with its irqfd. Dropping it frees both.
pub struct MsiLine {
    router: Arc<MsiRouter>,
    gsi: u32,
    irqfd: EventFd,
    message: MsiMessage,
    registered: bool,
}

impl MsiLine {
    fn allocate(
        router: &Arc<MsiRouter>,
        irqfd: impl FnOnce() -> io::Result<EventFd>,
    ) -> Result<Self, RouteError> {
        let mut routes = router.routes.lock();
        let gsi = match routes.free.pop() {
            Some(gsi) => gsi,
            None if routes.next < GSI_END => {
                routes.next += 1;
                routes.next - 1
            }
            None => return Err(RouteError::Full),
        };
        let irqfd = irqfd().map_err(|source| {
            routes.free.push(gsi);
            RouteError::EventFd { gsi, source }
        })?;
        drop(routes);
        let message = MsiMessage::default();
        Ok(Self { router: Arc::clone(router), gsi, irqfd, message, registered: false })
    }

    /// Raises the interrupt. If the guest has changed the message since the last call, updates the
    /// route first. The update is deferred until then, because guests change messages far more
    /// often than they use them.
    pub fn signal(&mut self, message: MsiMessage) -> Result<(), RouteError> {
        self.follow(message)?;
        self.irqfd.write(1).map_err(|source| RouteError::EventFd { gsi: self.gsi, source })
    }

    /// Sets the message to deliver from now on, even when another component raises the event.
    pub fn follow(&mut self, message: MsiMessage) -> Result<(), RouteError> {
        if message != self.message {
            self.router.route(self.gsi, message)?;
            self.message = message;
        }
        Ok(())
    }
}

impl Drop for MsiLine {
    fn drop(&mut self) {
        if self.registered {
            // This fails only if the VM no longer exists.
            let _ = self.router.controller.unregister_irqfd(&self.irqfd, self.gsi);
        }
        // Without an irqfd, the route is unused, and the next table omits it.
        let mut routes = self.router.routes.lock();
        routes.messages.remove(&self.gsi);
        routes.free.push(self.gsi);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Call, FakeController};
    use super::*;

    fn message(data: u32) -> MsiMessage {
        MsiMessage { address: 0xfee0_0000, data }
    }

    #[test]
    fn route_is_set_before_the_irqfd() {
        let controller = FakeController::new();
        let router = MsiRouter::new(controller.clone());
        let mut line = router.connect(message(1)).unwrap();
        line.signal(message(1)).unwrap();
        line.signal(message(1)).unwrap();
        assert_eq!(
            controller.take_calls(),
            [Call::Routes(vec![(24, message(1))]), Call::Register(24)]
        );
        assert_eq!(controller.count_of(24), 2);
    }

    #[test]
    fn changed_message_is_routed_on_use() {
        let controller = FakeController::new();
        let router = MsiRouter::new(controller.clone());
        let _other = router.connect(message(1)).unwrap();
        let mut line = router.connect(message(2)).unwrap();
        controller.take_calls();
        line.signal(message(3)).unwrap();
        assert_eq!(
            controller.take_calls(),
            [Call::Routes(vec![(24, message(1)), (25, message(3))])]
        );
    }

    #[test]
    fn dropped_line_frees_its_gsi() {
        let controller = FakeController::new();
        let router = MsiRouter::new(controller.clone());
        let first = router.connect(message(1)).unwrap();
        let _second = router.connect(message(2)).unwrap();
        drop(first);
        controller.take_calls();
        let _third = router.connect(message(3)).unwrap();
        let routes = Call::Routes(vec![(24, message(3)), (25, message(2))]);
        assert_eq!(controller.take_calls(), [routes, Call::Register(24)]);
    }

    #[test]
    fn refused_line_is_removed_completely() {
        let controller = FakeController::new();
        let router = MsiRouter::new(controller.clone());
        controller.refuse(true);
        assert!(matches!(router.connect(message(1)), Err(RouteError::Route { gsi: 24, .. })));
        controller.refuse(false);
        let mut line = router.connect(message(2)).unwrap();
        controller.refuse(true);
        assert!(line.signal(message(3)).is_err());
        controller.refuse(false);
        controller.take_calls();
        // The old route is still in the table, so the old message needs no new table.
        line.signal(message(2)).unwrap();
        assert_eq!(controller.take_calls(), []);
        assert_eq!(controller.count_of(24), 1);
    }

    #[test]
    fn gsis_run_out_at_the_limit_of_kvm() {
        let router = MsiRouter::new(FakeController::new());
        router.routes.lock().next = GSI_END - 1;
        let last = router.connect(message(1)).unwrap();
        assert!(matches!(router.connect(message(1)), Err(RouteError::Full)));
        drop(last);
        router.connect(message(1)).unwrap();
    }
}
