//! Resident memory of a VM. Reading it is expensive, so a separate thread reads it, at a limited
//! rate.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::warn;

use crate::vm::request::{Reply, ZoneInfo};
use crate::vm::vm_task::cached_value::CachedValue;

/// Minimum time between reads while the plugged sizes do not change. For each read, the kernel
/// walks the page tables of all mappings for milliseconds.
const MAX_AGE: Duration = Duration::from_secs(1);

pub(crate) struct Resident {
    read: Box<dyn Fn() -> io::Result<Vec<u64>> + Send + Sync>,
    queue: Mutex<Queue>,
    /// Resident bytes read last, and the plugged sizes at that time. Locked only by the answering
    /// thread.
    last: Mutex<CachedValue<Vec<u64>, Vec<u64>>>,
}

type Request = (Vec<ZoneInfo>, Reply<Vec<ZoneInfo>>);

#[derive(Default)]
struct Queue {
    waiting: Vec<Request>,
    /// True while a thread is answering. It will answer all waiting requests.
    is_answering: bool,
}

impl Resident {
    /// `read` returns the resident bytes of each zone, in the order of the zones.
    pub(crate) fn new(
        read: impl Fn() -> io::Result<Vec<u64>> + Send + Sync + 'static,
    ) -> Arc<Self> {
        let last = Mutex::new(CachedValue::new(MAX_AGE));
        Arc::new(Self { read: Box::new(read), queue: Mutex::default(), last })
    }

    /// Answers with `zones` and their resident bytes, from a thread that may block. Returns
    /// immediately. Must be called on a tokio runtime.
    ///
    /// One thread answers all requests. Otherwise, each waiting client would block another thread.
    pub(crate) fn answer(self: Arc<Self>, zones: Vec<ZoneInfo>, reply: Reply<Vec<ZoneInfo>>) {
        let was_answering = {
            let mut queue = self.queue.lock();
            queue.waiting.push((zones, reply));
            std::mem::replace(&mut queue.is_answering, true)
        };
        if !was_answering {
            tokio::task::spawn_blocking(move || self.answer_all());
        }
    }

    fn answer_all(&self) {
        while let Some(waiting) = self.take_waiting() {
            for (mut zones, reply) in waiting {
                self.fill_in(&mut zones);
                // An error means that the client has disconnected.
                let _ = reply.send(Ok(zones));
            }
        }
    }

    /// Takes all waiting requests. If no request is waiting, the next one starts a new thread.
    fn take_waiting(&self) -> Option<Vec<Request>> {
        let mut queue = self.queue.lock();
        let waiting = std::mem::take(&mut queue.waiting);
        queue.is_answering = !waiting.is_empty();
        queue.is_answering.then_some(waiting)
    }

    fn fill_in(&self, zones: &mut [ZoneInfo]) {
        let plugged = zones.iter().map(|zone| zone.plugged_bytes).collect();
        let mut last = self.last.lock();
        let resident = last.get(plugged, Instant::now(), || {
            (self.read)().unwrap_or_else(|err| {
                warn!(%err, "Cannot read the resident memory of the zones");
                vec![0; zones.len()]
            })
        });
        for (zone, bytes) in zones.iter_mut().zip(resident) {
            zone.resident_bytes = *bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use tokio::sync::oneshot;

    use super::*;

    fn zone() -> ZoneInfo {
        ZoneInfo {
            id: "dram".to_owned(),
            tier: "dram".to_owned(),
            boot_bytes: 1 << 30,
            ..ZoneInfo::default()
        }
    }

    #[test]
    fn answer_does_not_block_the_calling_thread() {
        let (go_on, wait) = mpsc::channel();
        let wait = Mutex::new(wait);
        let resident = Resident::new(move || {
            let waited = wait.lock().recv_timeout(Duration::from_secs(30));
            waited.map(|()| vec![4096]).map_err(io::Error::other)
        });
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let [(reply, answer), (reply_2, answer_2)] = [(), ()].map(|()| oneshot::channel());
            Arc::clone(&resident).answer(vec![zone()], reply);
            Arc::clone(&resident).answer(vec![zone()], reply_2);
            // The calling thread sends this after `answer` has returned.
            go_on.send(()).unwrap();
            for answer in [answer, answer_2] {
                assert_eq!(answer.await.unwrap().unwrap()[0].resident_bytes, 4096);
            }
        });
    }

    #[test]
    fn many_requests_are_answered_by_one_thread() {
        let (gate, wait) = mpsc::channel::<()>();
        let wait = Mutex::new(wait);
        // The read blocks until the gate is dropped.
        let resident =
            Resident::new(move || match wait.lock().recv_timeout(Duration::from_secs(30)) {
                Err(mpsc::RecvTimeoutError::Disconnected) => Ok(vec![4096]),
                _ => Err(io::Error::other("the gate stays closed")),
            });
        let mut gate = Some(gate);
        let threads = Arc::new(AtomicUsize::new(0));
        let started = Arc::clone(&threads);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .on_thread_start(move || {
                started.fetch_add(1, Ordering::Relaxed);
            })
            .build()
            .unwrap();
        runtime.block_on(async {
            // The second round shows that later requests are answered too.
            for plugged_bytes in [0, 2 << 20] {
                let answers = [(); 100].map(|()| {
                    let (reply, answer) = oneshot::channel();
                    Arc::clone(&resident).answer(vec![ZoneInfo { plugged_bytes, ..zone() }], reply);
                    answer
                });
                drop(gate.take());
                for answer in answers {
                    assert_eq!(answer.await.unwrap().unwrap()[0].resident_bytes, 4096);
                }
            }
        });
        // The second round may start before the first thread is idle.
        let threads = threads.load(Ordering::Relaxed);
        assert!((1..=2).contains(&threads), "{threads} threads");
    }
}
