//! Tests of plug budgets: a hostile driver on a simulated clock, and delayed requests.

use super::*;
use crate::virtio::mem::event::RETRY_INTERVAL;
use crate::virtio::mem::request::{BlockRun, Request, Response};

const BLOCKS: u16 = 8;
const ZONE_BYTES: u64 = BLOCKS as u64 * BLOCK_BYTES;
/// Rate that is too low to refill even one block during a test.
const NO_REFILL: NonZeroU64 = NonZeroU64::new(1).unwrap();

fn guest(rate: Option<NonZeroU64>) -> Guest {
    let guest = Guest::with_rate(u64::from(BLOCKS), Some(u64::from(BLOCKS)), rate);
    guest.handle.request_size(ZONE_BYTES).unwrap();
    guest
}

/// Creates a guest that has used up its budget and has nothing plugged. Its request to plug 4
/// blocks is delayed.
fn delayed_guest() -> Guest {
    let mut guest = guest(Some(NO_REFILL));
    assert_eq!((guest.plug(0, BLOCKS), guest.unplug(0, BLOCKS)), (ACK, ACK));
    post(&mut guest, 0, PLUG, 0, 4);
    wait_until_throttled(&guest, 1);
    guest
}

/// Makes a request available. It uses descriptors `head` and `head + 1` and its own buffers.
fn post(guest: &mut Guest, head: u16, code: u16, block: u64, count: u16) {
    let head_offset = u64::from(head) * 0x40;
    guest.write_request_at(REQUEST + head_offset, code, block, count);
    guest.write_descriptor(head, REQUEST + head_offset, 24, 1);
    guest.write_descriptor(head + 1, ANSWER + head_offset, 10, 2);
    guest.post(head);
}

fn answer(guest: &Guest, head: u16) -> u16 {
    guest.memory.boot().read_obj(GuestAddress(ANSWER + u64::from(head) * 0x40)).unwrap()
}

fn used(guest: &Guest) -> u16 {
    guest.memory.boot().read_obj(GuestAddress(USED + 2)).unwrap()
}

fn used_head(guest: &Guest, nth: u16) -> u32 {
    guest.memory.boot().read_obj(GuestAddress(USED + 4 + 8 * u64::from(nth % 16))).unwrap()
}

fn wait_until(description: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < TIMEOUT, "waited too long until {description}");
        thread::yield_now();
    }
}

fn wait_until_throttled(guest: &Guest, requests: u64) {
    let metrics = guest.handle.metrics();
    wait_until("a request is delayed", || metrics.throttled.requests() == requests);
}

/// Fills the budget and wakes the worker like an expired timer.
fn refill(guest: &Guest) {
    *guest.budget.lock() = PlugBudget::new(guest.handle.zone(), Instant::now());
    guest.kick.write(1).unwrap();
}

/// Simulates a hostile driver that plugs and unplugs the whole zone in a loop, with 1 ms per
/// request, for `seconds` on its own clock. Returns the number of plugged bytes and the number of
/// bytes that the pool has erased.
fn plug_storm(rate: Option<NonZeroU64>, seconds: u64) -> (u64, u64) {
    let guest = guest(rate);
    let run = BlockRun { addr: START, count: BLOCKS };
    let start = Instant::now();
    let (mut now, mut is_plugged) = (start, false);
    while now < start + Duration::from_secs(seconds) {
        let request = if is_plugged { Request::Unplug(run) } else { Request::Plug(run) };
        match guest.device.execute(request, now) {
            Ok(response) => {
                assert_eq!(response, Response::Ack);
                is_plugged = !is_plugged;
                now += Duration::from_millis(1);
            }
            Err(wait) => now += wait,
        }
    }
    (guest.handle.metrics().plug.bytes(), guest.pool.scrubbed_bytes())
}

#[test]
fn plug_storm_is_held_to_the_rate() {
    let is_held = |bytes: u64, seconds: u64| bytes <= ZONE_BYTES + seconds * GIB;
    let (plugged, erased) = plug_storm(NonZeroU64::new(GIB), 10);
    assert!(is_held(plugged, 10) && is_held(erased, 10), "{plugged} plugged, {erased} erased");
    // The limit does not prevent the driver from using the full rate.
    assert!(plugged >= 10 * GIB, "{plugged}");
    // Without a budget, the same driver exceeds the limit.
    let (plugged, erased) = plug_storm(None, 2);
    assert!(!is_held(plugged, 2) && !is_held(erased, 2), "{plugged} plugged, {erased} erased");
}

#[test]
fn requests_without_effect_are_held_to_a_rate() {
    let guest = guest(None);
    let run = BlockRun { addr: START, count: BLOCKS };
    let start = Instant::now();
    let (mut now, mut served) = (start, 0);
    // The device answers these requests with the state, ERROR and ERROR.
    let requests = [Request::State(run), Request::Unplug(run), Request::Unknown(7)];
    for request in requests.iter().cycle() {
        if now > start + Duration::from_secs(2) {
            break;
        }
        match guest.device.execute(*request, now) {
            Ok(_) => served += 1,
            Err(wait) => now += wait,
        }
    }
    assert_eq!(served, 1024 + 2 * 4096);
}

#[test]
fn delayed_request_is_answered_by_a_timer() {
    let mut guest = guest(NonZeroU64::new(2 * ZONE_BYTES));
    let started = Instant::now();
    assert_eq!((guest.plug(0, BLOCKS), guest.unplug(0, BLOCKS)), (ACK, ACK));
    assert_eq!(guest.plug(0, BLOCKS), ACK);
    assert!(started.elapsed() >= Duration::from_millis(500), "{:?}", started.elapsed());
    assert!(guest.reachable(0));
    let throttled = &guest.handle.metrics().throttled;
    assert!(throttled.delay() <= started.elapsed());
    assert_eq!(throttled.requests() > 0, throttled.delay() > Duration::ZERO);
}

#[test]
fn notifications_do_not_repeat_a_delayed_request() {
    let guest = delayed_guest();
    let refusals = || guest.budget.lock().refusals;
    let event_loop = guest.event_loop.handle();
    let (started, before) = (Instant::now(), refusals());
    for _ in 0..1000 {
        guest.kick.write(1).unwrap();
        // Runs one pass of the event loop.
        event_loop.hold();
        event_loop.wait_until_held();
        event_loop.release();
    }
    let refused = refusals() - before;
    let intervals = started.elapsed().as_nanos() / RETRY_INTERVAL.as_nanos();
    assert!(u128::from(refused) <= intervals + 2, "{refused} attempts in {intervals} intervals");
}

#[test]
fn requests_behind_a_delayed_one_are_answered_after_it() {
    let mut guest = delayed_guest();
    post(&mut guest, 2, STATE, 0, 4);
    assert_eq!((used(&guest), guest.handle.sizes().plugged_bytes), (2, 0));
    refill(&guest);
    wait_until("both requests are answered", || used(&guest) == 4);
    assert_eq!((used_head(&guest, 2), used_head(&guest, 3)), (0, 2));
    // The second request reads the state after the plug.
    let state: u16 = guest.memory.boot().read_obj(GuestAddress(ANSWER + 0x80 + 8)).unwrap();
    assert_eq!((answer(&guest, 0), answer(&guest, 2), state), (ACK, ACK, 0));
    assert_eq!(guest.handle.metrics().throttled.requests(), 1);
}

#[test]
fn unplugs_are_never_delayed() {
    let mut guest = guest(Some(NO_REFILL));
    assert_eq!(guest.plug(0, BLOCKS), ACK);
    assert_eq!((guest.unplug(0, 1), guest.send(UNPLUG_ALL, 0, 0).0), (ACK, ACK));
    // A refused request is not delayed either.
    assert_eq!((guest.plug(0, BLOCKS + 1), guest.send(STATE, 0, 1)), (NACK, (ACK, 1)));
    let throttled = &guest.handle.metrics().throttled;
    assert_eq!((throttled.requests(), throttled.delay()), (0, Duration::ZERO));
}

#[test]
fn device_reset_drops_a_delayed_request_and_keeps_the_budget() {
    let mut guest = delayed_guest();
    guest.device.reset();
    guest.load_driver();
    assert_eq!(guest.send(STATE, 0, 4), (ACK, 1));
    assert_eq!((guest.handle.sizes().plugged_bytes, guest.pool_info().memory_bytes), (0, 0));
    post(&mut guest, 0, PLUG, 0, 4);
    wait_until_throttled(&guest, 2);
    refill(&guest);
    wait_until("the plug is answered", || used(&guest) == 2);
    assert_eq!((answer(&guest, 0), guest.handle.sizes().plugged_bytes), (ACK, 4 * BLOCK_BYTES));
}

#[test]
fn removed_device_drops_a_delayed_request() {
    let mut guest = guest(Some(NO_REFILL));
    assert_eq!((guest.plug(0, BLOCKS), guest.unplug(4, 4)), (ACK, ACK));
    post(&mut guest, 0, PLUG, 4, 4);
    wait_until_throttled(&guest, 1);
    let Guest { device, pool, .. } = guest;
    drop(device);
    assert_eq!((pool.info().memory_bytes, pool.dirty_free_bytes()), (0, 0));
}

#[test]
fn delayed_request_is_checked_against_a_lowered_size() {
    let guest = delayed_guest();
    guest.handle.request_size(3 * BLOCK_BYTES).unwrap();
    refill(&guest);
    wait_until("the plug is answered", || used(&guest) == 3);
    assert_eq!((answer(&guest, 0), guest.handle.sizes().plugged_bytes), (NACK, 0));
    assert_eq!(guest.handle.metrics().nacks(), 1);
}

/// The timer and a notification arrive in one pass of the event loop, and the request is delayed
/// again.
#[test]
fn notification_beside_the_timer_does_not_block_the_loop() {
    let drained = |rate: u64| {
        let zone = ZoneSpec {
            plug_bytes_per_s: NonZeroU64::new(rate),
            ..guest(None).handle.zone().clone()
        };
        let mut budget = PlugBudget::new(&zone, Instant::now());
        budget.take(ZONE_BYTES, Instant::now()).unwrap();
        budget
    };
    let mut guest = guest(Some(NO_REFILL));
    *guest.budget.lock() = drained(ZONE_BYTES);
    post(&mut guest, 0, PLUG, 0, BLOCKS);
    wait_until_throttled(&guest, 1);
    let event_loop = guest.event_loop.handle();
    event_loop.hold();
    event_loop.wait_until_held();
    // With this rate, the timer expires later than [`TIMEOUT`], so a blocked loop makes the test
    // fail.
    *guest.budget.lock() = drained(ZONE_BYTES / 60);
    guest.kick.write(1).unwrap();
    let started = Instant::now();
    wait_until("the timer expires", || started.elapsed() > Duration::from_millis(1100));
    event_loop.release();
    // If the loop is blocked, it cannot be held again.
    event_loop.hold();
    let (held, is_held) = mpsc::channel();
    let waiter = event_loop.clone();
    thread::spawn(move || {
        waiter.wait_until_held();
        let _ = held.send(());
    });
    is_held.recv_timeout(TIMEOUT).expect("a blocked event loop");
    event_loop.release();
    refill(&guest);
    wait_until("the plug is answered", || used(&guest) == 1);
    assert_eq!(answer(&guest, 0), ACK);
}

#[test]
fn delayed_request_waits_during_a_pause() {
    let guest = delayed_guest();
    let event_loop = guest.event_loop.handle();
    event_loop.hold();
    event_loop.wait_until_held();
    refill(&guest);
    assert_eq!((used(&guest), guest.handle.sizes().plugged_bytes), (2, 0));
    event_loop.release();
    wait_until("the plug is answered", || used(&guest) == 3);
    assert_eq!((answer(&guest, 0), guest.handle.sizes().plugged_bytes), (ACK, 4 * BLOCK_BYTES));
}
