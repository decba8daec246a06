//! Tests of the limiter. Faulty limiters show that the checks find faults.

use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const BOUNDS: Bounds = Bounds { burst: 4, span: Duration::from_secs(60) };

fn zone() -> Source {
    Source::Zone("pm".to_owned())
}

fn device(id: u32) -> Source {
    Source::Device(id.to_string())
}

/// Passes the events 0 to 99 to the limiter at the same time.
fn admit_hundred(limiter: &mut Limiter<u64>, source: &Source, now: Instant) {
    for event in 0..100 {
        limiter.admit(source.clone(), &event, now);
    }
}

#[test]
fn repeated_event_of_a_zone_is_not_sent() {
    let (now, mut limiter) = (Instant::now(), Limiter::new(Bounds::USUAL));
    for (event, verdict) in [
        (0, Verdict::Emit),
        (0, Verdict::Repeated),
        (2, Verdict::Emit),
        (1, Verdict::Emit),
        (1, Verdict::Repeated),
        (2, Verdict::Emit),
    ] {
        assert_eq!(limiter.admit(zone(), &event, now), verdict, "{event}");
    }
    // Repeated events of a device are all sent, because each is a separate occurrence.
    assert!((0..3).all(|_| limiter.admit(device(1), &0, now) == Verdict::Emit));
}

#[test]
fn one_event_per_span_is_sent_after_a_burst() {
    let (start, mut limiter) = (Instant::now(), Limiter::new(BOUNDS));
    let mut emitted =
        |at| (0..100).filter(|nth| limiter.admit(device(1), nth, at) == Verdict::Emit).count();
    assert_eq!(emitted(start), 4);
    assert_eq!(emitted(start + BOUNDS.span - SECOND), 0);
    assert_eq!(emitted(start + BOUNDS.span), 1);
    // Withholding an event does not restart the current span.
    assert_eq!(emitted(start + BOUNDS.span * 2 - SECOND), 0);
    assert_eq!(emitted(start + BOUNDS.span * 2 + SECOND), 1);
    assert_eq!(emitted(start + BOUNDS.span * 3), 1);
    assert_eq!(emitted(start + BOUNDS.span * 100), 4);
}

#[test]
fn sources_have_separate_allowances() {
    let (now, mut limiter) = (Instant::now(), Limiter::new(BOUNDS));
    for source in [Source::Vm, zone(), device(1), device(2)] {
        let emitted =
            (0..100).filter(|nth| limiter.admit(source.clone(), nth, now) == Verdict::Emit);
        assert_eq!(emitted.count(), 4, "{source:?}");
    }
}

#[test]
fn last_withheld_event_is_sent_at_the_end_of_its_span() {
    let (start, mut limiter) = (Instant::now(), Limiter::new(BOUNDS));
    assert_eq!(limiter.due(), None);
    admit_hundred(&mut limiter, &zone(), start);
    assert_eq!((limiter.due(), limiter.release(start)), (Some(start + BOUNDS.span), vec![]));
    // The withheld event will still be sent, so repeating it is not new.
    assert_eq!(limiter.admit(zone(), &99, start), Verdict::Repeated);
    assert_eq!(limiter.release(start + BOUNDS.span), [99]);
    assert_eq!((limiter.due(), limiter.release(start + BOUNDS.span * 9)), (None, vec![]));
    assert_eq!(limiter.admit(zone(), &99, start + BOUNDS.span * 9), Verdict::Repeated);
}

#[test]
fn withheld_event_is_dropped_if_the_state_changes_back() {
    let (now, mut limiter) = (Instant::now(), Limiter::new(BOUNDS));
    assert!((0..4).all(|nth| limiter.admit(zone(), &nth, now) == Verdict::Emit));
    assert_eq!(limiter.admit(zone(), &7, now), Verdict::Withhold);
    assert_eq!(
        limiter.admit(zone(), &3, now),
        Verdict::Repeated,
        "the state equals that of the last event"
    );
    assert_eq!((limiter.due(), limiter.release_all()), (None, vec![]));
}

#[test]
fn result_of_a_request_is_sent_beyond_the_allowance() {
    let (now, mut limiter) = (Instant::now(), Limiter::new(BOUNDS));
    assert_eq!(limiter.admit(zone(), &1, now), Verdict::Emit);
    limiter.record_request(zone(), now);
    assert_eq!(limiter.admit(zone(), &1, now), Verdict::Emit);
    admit_hundred(&mut limiter, &zone(), now);
    limiter.record_request(zone(), now);
    assert_eq!(limiter.admit(zone(), &98, now), Verdict::Emit, "the withheld event was replaced");
    assert_eq!(
        (limiter.admit(zone(), &1, now), limiter.due()),
        (Verdict::Withhold, Some(now + BOUNDS.span))
    );
    // A request exempts the next event from the limit, but not an event that is already withheld.
    limiter.record_request(zone(), now);
    assert_eq!((limiter.due(), limiter.release(now)), (Some(now + BOUNDS.span), vec![]));
    assert_eq!(limiter.admit(zone(), &1, now), Verdict::Emit, "withheld or not");
    assert_eq!((limiter.due(), limiter.admit(zone(), &1, now)), (None, Verdict::Repeated));
}

#[test]
fn end_of_a_machine_drops_withheld_events_except_those_of_the_vm() {
    let (now, mut limiter) = (Instant::now(), Limiter::new(BOUNDS));
    for source in [Source::Vm, zone(), device(1)] {
        admit_hundred(&mut limiter, &source, now);
    }
    limiter.end_machine();
    assert_eq!((limiter.release_of(&zone()), limiter.release_of(&device(1))), (None, None));
    assert_eq!(limiter.release_of(&Source::Vm), Some(99));
    // After a reboot, the zone may reach the same state again, which is then a new event.
    let later = now + BOUNDS.span;
    assert_eq!(limiter.admit(zone(), &3, later), Verdict::Emit);
}

#[test]
fn accounts_of_removed_devices_are_dropped() {
    let (start, mut limiter) = (Instant::now(), Limiter::new(BOUNDS));
    for nth in 0..1000 {
        limiter.admit(device(nth), &0, start + BOUNDS.span * nth);
        assert!(limiter.accounts.len() < 4, "{:?}", limiter.accounts);
    }
}

/// Limiter under test, correct or faulty.
trait Rule {
    fn admit(&mut self, source: Source, event: u64, now: Instant) -> Verdict;
    fn release(&mut self, now: Instant) -> Vec<u64>;
    fn end_machine(&mut self);
}

impl Rule for Limiter<u64> {
    fn admit(&mut self, source: Source, event: u64, now: Instant) -> Verdict {
        self.admit(source, &event, now)
    }
    fn release(&mut self, now: Instant) -> Vec<u64> {
        self.release(now)
    }
    fn end_machine(&mut self) {
        self.end_machine();
    }
}

/// Faulty: the allowance is renewed at each reboot.
struct OfOneMachine(Limiter<u64>);

impl Rule for OfOneMachine {
    fn admit(&mut self, source: Source, event: u64, now: Instant) -> Verdict {
        self.0.admit(source, &event, now)
    }
    fn release(&mut self, now: Instant) -> Vec<u64> {
        self.0.release(now)
    }
    fn end_machine(&mut self) {
        self.0 = Limiter::new(BOUNDS);
    }
}

/// Faulty: withheld events are never sent.
struct ForgetsTheLast(Limiter<u64>);

impl Rule for ForgetsTheLast {
    fn admit(&mut self, source: Source, event: u64, now: Instant) -> Verdict {
        self.0.admit(source, &event, now)
    }
    fn release(&mut self, _: Instant) -> Vec<u64> {
        Vec::new()
    }
    fn end_machine(&mut self) {
        self.0.end_machine();
    }
}

/// Faulty: only repeated events are suppressed, and the rate of other events is not limited.
struct OnlyRepetitions(Option<u64>);

impl Rule for OnlyRepetitions {
    fn admit(&mut self, _: Source, event: u64, _: Instant) -> Verdict {
        if self.0.replace(event) == Some(event) { Verdict::Repeated } else { Verdict::Emit }
    }
    fn release(&mut self, _: Instant) -> Vec<u64> {
        Vec::new()
    }
    fn end_machine(&mut self) {}
}

/// Step of a test. Each step follows the previous one after some seconds.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// The source reports this event.
    Event(u64),
    EndMachine,
}

/// Executes the steps and returns an error if a rule is violated. Rule 1: a source never sends more
/// events than the burst, plus one for each span that has begun. Rule 2: in the end, a watcher has
/// received the last event, unless the machine has ended.
fn check(rule: &mut dyn Rule, source: &Source, steps: &[(u32, Step)]) -> Result<(), String> {
    let start = Instant::now();
    let (mut emitted, mut last_emitted, mut happened, mut now) = (0, None, None, start);
    for &(seconds, step) in steps {
        now += SECOND * seconds;
        for event in rule.release(now) {
            (emitted, last_emitted) = (emitted + 1, Some(event));
        }
        match step {
            Step::Event(event) => {
                happened = Some(event);
                if rule.admit(source.clone(), event, now) == Verdict::Emit {
                    (emitted, last_emitted) = (emitted + 1, Some(event));
                }
            }
            Step::EndMachine => {
                rule.end_machine();
                if !matches!(source, Source::Vm | Source::Kind(..)) {
                    (last_emitted, happened) = (None, None);
                }
            }
        }
        let max = BOUNDS.burst + ((now - start).as_secs() / BOUNDS.span.as_secs()) as u32;
        if emitted > max {
            return Err(format!("{emitted} of {max} events after {:?}", now - start));
        }
    }
    last_emitted = rule.release(now + BOUNDS.span).into_iter().next_back().or(last_emitted);
    if happened.is_some() && last_emitted != happened {
        return Err(format!("{happened:?} happened, but {last_emitted:?} was seen"));
    }
    Ok(())
}

fn any_steps() -> impl Strategy<Value = Vec<(u32, Step)>> {
    let step = prop_oneof![9 => (0u64..4).prop_map(Step::Event), 1 => Just(Step::EndMachine)];
    prop::collection::vec((0u32..50, step), 1..200)
}

proptest! {
    #[test]
    fn rate_is_limited_and_the_last_event_is_sent(steps in any_steps()) {
        for source in [Source::Vm, device(1), zone()] {
            prop_assert_eq!(check(&mut Limiter::new(BOUNDS), &source, &steps), Ok(()));
        }
    }
}

#[test]
fn faulty_limiters_are_detected() {
    let resets: Vec<_> =
        (0..100).flat_map(|nth| [(1, Step::Event(nth)), (0, Step::EndMachine)]).collect();
    let flaps: Vec<_> = (0..101).map(|nth| (1, Step::Event(nth % 2))).collect();
    for source in [Source::Vm, device(1), zone()] {
        for steps in [&resets, &flaps] {
            assert_eq!(check(&mut Limiter::new(BOUNDS), &source, steps), Ok(()));
        }
        let violation =
            check(&mut OfOneMachine(Limiter::new(BOUNDS)), &source, &resets).unwrap_err();
        assert!(violation.starts_with("5 of 4"), "{violation}");
        let violation = check(&mut OnlyRepetitions(None), &source, &flaps).unwrap_err();
        assert!(violation.starts_with("5 of 4"), "{violation}");
    }
    let violation =
        check(&mut ForgetsTheLast(Limiter::new(BOUNDS)), &zone(), &flaps[..5]).unwrap_err();
    assert_eq!(violation, "Some(0) happened, but Some(1) was seen");
}

#[test]
fn panics_neither_withhold_restarts_nor_are_replaced_by_them() {
    let (mut limiter, now) = (Limiter::new(Bounds::USUAL), Instant::now());
    let emitted = (0..1000)
        .filter(|nth| limiter.admit(Source::Kind("foreshore", "panic"), nth, now) == Verdict::Emit)
        .count();
    assert_eq!(emitted, Bounds::USUAL.burst as usize);
    assert_eq!(limiter.admit(Source::Vm, &1000, now), Verdict::Emit);
    // A panic is still sent after its machine has ended.
    limiter.end_machine();
    assert_eq!(limiter.release_of(&Source::Kind("foreshore", "panic")), Some(999));
}
