//! vCPU hotplug state machine.
//!
//! ```text
//!            put         request_removal            eject              parked
//!   Absent ───────► Present ───────────────► Leaving ────────────────► Gone ─────────► Absent
//!           (VM task)           (VM task)            (guest's write)       (VM task)
//! ```
//!
//! Present vCPUs always have the lowest indices, because removal starts with the highest. While a
//! vCPU is leaving, no vCPU is added and no other removal is requested. vCPU 0 boots the guest and
//! is never removed.

use std::collections::BTreeSet;
use std::ops::Range;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Absent,
    Present,
    /// Removal requested.
    Leaving,
    /// Ejected by the guest, but the vCPU's thread is not yet parked.
    Gone,
}

/// Change that a resize requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The number of vCPUs is already right, or will be once the leaving vCPUs are ejected.
    Nothing,
    Come(Range<u8>),
    /// Removal of these vCPUs must be requested.
    Go(Range<u8>),
}

/// vCPUs that have not left yet, in ascending order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pending(pub Vec<u8>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plug {
    /// States by index, one for each vCPU up to the maximum.
    states: Vec<State>,
    /// Added vCPUs that the guest has not been notified of.
    added: BTreeSet<u8>,
    /// vCPUs whose requested removal the guest has not been notified of.
    requested: BTreeSet<u8>,
}

impl Plug {
    /// State of a guest that boots with `boot` of `max` vCPUs.
    pub(crate) fn new(boot: u8, max: u8) -> Self {
        let state = |index| if index < boot { State::Present } else { State::Absent };
        Self {
            states: (0..max).map(state).collect(),
            added: BTreeSet::new(),
            requested: BTreeSet::new(),
        }
    }

    fn of(&self, state: State) -> impl Iterator<Item = u8> {
        (0..).zip(&self.states).filter(move |(_, is)| **is == state).map(|(index, _)| index)
    }

    /// Number of present vCPUs without a requested removal.
    pub(crate) fn present(&self) -> u8 {
        self.of(State::Present).count() as u8
    }

    /// Leaving vCPUs in ascending order.
    pub(crate) fn pending(&self) -> Vec<u8> {
        let is_pending = |state: &State| matches!(state, State::Leaving | State::Gone);
        (0..)
            .zip(&self.states)
            .filter(|(_, state)| is_pending(state))
            .map(|(index, _)| index)
            .collect()
    }

    /// Next step towards `desired` vCPUs, from 1 to the maximum. Fails while other vCPUs are
    /// leaving.
    pub(crate) fn step(&self, desired: u8) -> Result<Step, Pending> {
        let present = self.present();
        let pending = self.pending();
        match desired {
            same if same == present => Ok(Step::Nothing),
            _ if !pending.is_empty() => Err(Pending(pending)),
            more if more > present => Ok(Step::Come(present..more)),
            fewer => Ok(Step::Go(fewer..present)),
        }
    }

    pub(crate) fn put(&mut self, come: Range<u8>) {
        for index in come {
            self.set(index, State::Absent, State::Present);
            self.added.insert(index);
        }
    }

    /// Requests the removal of `go`.
    pub(crate) fn request_removal(&mut self, go: Range<u8>) {
        for index in go {
            assert_ne!(index, 0, "vCPU 0 stays");
            self.set(index, State::Present, State::Leaving);
            self.added.remove(&index);
            self.requested.insert(index);
        }
    }

    /// Notifies the guest of the leaving vCPUs again. Returns false if no vCPU is leaving.
    pub(crate) fn notify_again(&mut self) -> bool {
        self.requested = self.of(State::Leaving).collect();
        !self.requested.is_empty()
    }

    fn set(&mut self, index: u8, from: State, to: State) {
        let state = &mut self.states[usize::from(index)];
        assert_eq!(*state, from, "vCPU {index} becomes {to:?}");
        *state = to;
    }

    /// Marks a vCPU as absent after its thread is parked.
    pub(crate) fn parked(&mut self, index: u8) {
        self.set(index, State::Gone, State::Absent);
    }

    /// Ejects a vCPU for the guest. Returns false, and changes nothing, if its removal was not
    /// requested.
    pub(crate) fn eject(&mut self, index: u8) -> bool {
        let Some(state) = self.states.get_mut(usize::from(index)) else { return false };
        if *state != State::Leaving {
            return false;
        }
        *state = State::Gone;
        self.requested.remove(&index);
        true
    }

    /// Returns true if the guest sees the vCPU as present. `index` can exceed the number of vCPUs.
    pub(crate) fn is_there(&self, index: u8) -> bool {
        let state = self.states.get(usize::from(index));
        matches!(state, Some(State::Present | State::Leaving))
    }

    /// Takes the lowest vCPU from the list of unreported additions.
    pub(crate) fn next_added(&mut self) -> Option<u8> {
        self.added.pop_first()
    }

    /// Takes the highest vCPU from the list of unreported removals.
    pub(crate) fn next_removal(&mut self) -> Option<u8> {
        self.requested.pop_last()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn vcpus_are_added_upward_and_removed_downward() {
        let mut plug = Plug::new(1, 4);
        assert_eq!(plug.step(1), Ok(Step::Nothing));
        assert_eq!(plug.step(4), Ok(Step::Come(1..4)));
        plug.put(1..4);
        assert_eq!((plug.present(), plug.step(4)), (4, Ok(Step::Nothing)));
        assert_eq!([(); 4].map(|()| plug.next_added()), [Some(1), Some(2), Some(3), None]);
        assert_eq!(plug.step(2), Ok(Step::Go(2..4)));
        plug.request_removal(2..4);
        assert_eq!([(); 3].map(|()| plug.next_removal()), [Some(3), Some(2), None]);
        assert_eq!((plug.present(), plug.pending()), (2, vec![2, 3]));
    }

    #[test]
    fn no_other_resize_while_a_vcpu_is_leaving() {
        let mut plug = Plug::new(4, 4);
        plug.request_removal(2..4);
        assert_eq!(plug.step(2), Ok(Step::Nothing), "a repeated request is harmless");
        for desired in [1, 3, 4] {
            assert_eq!(plug.step(desired), Err(Pending(vec![2, 3])));
        }
        assert!(plug.eject(3) && plug.is_there(2) && !plug.is_there(3));
        // The threads are not parked yet.
        assert_eq!(plug.step(4), Err(Pending(vec![2, 3])));
        plug.parked(3);
        assert_eq!(plug.step(4), Err(Pending(vec![2])));
        assert!(plug.eject(2));
        plug.parked(2);
        assert_eq!((plug.pending(), plug.step(4)), (vec![], Ok(Step::Come(2..4))));
    }

    #[test]
    fn ignored_removal_request_is_repeated() {
        let mut plug = Plug::new(3, 3);
        assert!(!plug.notify_again());
        plug.request_removal(1..3);
        assert_eq!([plug.next_removal(), plug.next_removal()], [Some(2), Some(1)]);
        assert!(plug.eject(2) && plug.notify_again());
        assert_eq!([plug.next_removal(), plug.next_removal()], [Some(1), None]);
    }

    #[test]
    fn vcpu_removed_before_announcement_is_not_announced() {
        let mut plug = Plug::new(1, 2);
        plug.put(1..2);
        plug.request_removal(1..2);
        assert_eq!((plug.next_added(), plug.next_removal()), (None, Some(1)));
    }

    #[test]
    fn eject_without_request_is_ignored() {
        let mut plug = Plug::new(2, 3);
        let before = plug.clone();
        for index in 0..=255 {
            assert!(!plug.eject(index), "vCPU {index}");
        }
        assert_eq!(plug, before);
        plug.request_removal(1..2);
        assert!(plug.eject(1) && !plug.eject(1), "the vCPU is removed once");
    }

    proptest! {
        /// For any sequence of resizes and ejections, present vCPUs have the lowest indices.
        #[test]
        fn present_vcpus_have_the_lowest_indices(acts in prop::collection::vec((any::<bool>(), 0u8..8), 0..100)) {
            let mut plug = Plug::new(3, 6);
            for (resizes, number) in acts {
                if resizes {
                    let desired = 1 + number % 6;
                    match plug.step(desired) {
                        Ok(Step::Come(come)) => plug.put(come),
                        Ok(Step::Go(go)) => plug.request_removal(go),
                        Ok(Step::Nothing) => {}
                        Err(Pending(pending)) => prop_assert!(!pending.is_empty()),
                    }
                } else if plug.eject(number) {
                    plug.parked(number);
                }
                let present = plug.present();
                prop_assert!(present >= 1);
                prop_assert!((0..present).all(|index| plug.is_there(index)));
                prop_assert!(plug.pending().iter().all(|&index| index >= present));
            }
        }
    }
}
