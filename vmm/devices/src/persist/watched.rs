//! Wrapper that records the first failed flush of a volume.

use std::sync::{Arc, OnceLock};

use super::{Persist, PersistError};

/// Record of the reason why the first flush failed.
///
/// After a failed flush, the volume is not durable until the pool is opened again
/// (docs/design/durability.md). Only the first reason is kept, because it is the relevant one.
/// Holding this record does not keep the volume open.
#[derive(Clone, Debug, Default)]
pub struct FirstFailure(Arc<OnceLock<String>>);

impl FirstFailure {
    /// Records the reason, unless one is already recorded.
    pub fn record(&self, reason: &dyn std::fmt::Display) {
        self.0.get_or_init(|| reason.to_string());
    }

    /// Reason of the first failed flush, if any.
    pub fn reason(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }
}

/// Content that can be made durable, with a record of the first failure.
pub struct Watched {
    backing: Arc<dyn Persist>,
    failure: FirstFailure,
    lost_store: OnceLock<String>,
}

impl Watched {
    /// Wraps `backing`. No failure is recorded yet.
    pub fn new(backing: Arc<dyn Persist>) -> Arc<Self> {
        Arc::new(Self { backing, failure: FirstFailure::default(), lost_store: OnceLock::new() })
    }

    /// Makes all later flushes fail, because a store did not reach the backing.
    pub fn fail(&self, reason: String) {
        self.failure.record(&reason);
        self.lost_store.get_or_init(|| reason);
    }

    /// Shared record of the first failure.
    pub fn failure(&self) -> FirstFailure {
        self.failure.clone()
    }
}

impl Persist for Watched {
    fn persist(&self) -> Result<(), PersistError> {
        let result = match self.lost_store.get() {
            None => self.backing.persist(),
            Some(reason) => Err(PersistError::Backing(reason.clone().into())),
        };
        match &result {
            // On a read-only volume, no write can be lost.
            Ok(()) | Err(PersistError::ReadOnlyVolume) => {}
            Err(err) => self.failure.record(err),
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;
    use crate::persist::ReadOnly;

    /// Fake content. Each flush returns the next of these results.
    struct Script(Mutex<Vec<Result<(), PersistError>>>);

    impl Persist for Script {
        fn persist(&self) -> Result<(), PersistError> {
            self.0.lock().remove(0)
        }
    }

    #[test]
    fn first_failure_is_kept_and_results_are_passed_on() {
        let backing = |text: &str| Err(PersistError::Backing(text.to_owned().into()));
        let script = Script(Mutex::new(vec![Ok(()), backing("no room"), backing("later"), Ok(())]));
        let watched = Watched::new(Arc::new(script));
        watched.persist().unwrap();
        let failure = watched.failure();
        assert_eq!(failure.reason(), None);
        assert!(watched.persist().is_err());
        assert!(watched.persist().is_err());
        watched.persist().unwrap();
        assert!(failure.reason().unwrap().contains("no room"), "{failure:?}");
    }

    #[test]
    fn flush_after_a_lost_store_fails() {
        let watched = Watched::new(Arc::new(Script(Mutex::new(vec![Ok(())]))));
        watched.persist().unwrap();
        watched.fail("cannot map its chunk".to_owned());
        for _ in 0..2 {
            let error = watched.persist().unwrap_err().to_string();
            assert!(error.contains("cannot map its chunk"), "{error}");
        }
        assert_eq!(watched.failure().reason(), Some("cannot map its chunk"));
    }

    #[test]
    fn readonly_volume_does_not_count_as_failed() {
        let watched = Watched::new(Arc::new(ReadOnly));
        assert!(watched.persist().is_err());
        assert_eq!(watched.failure().reason(), None);
    }
}
