//! Support for tests that open hundreds of thousands of crash images. The support counts images,
//! and can replay a single image by its numbers.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::media::simulator::{CrashPoint, Digest, Random, Simulator};

/// Numbers of the image to replay: `PMEM_VOLUME_CRASH_SEED=SEED[,STEP[,POINT[,IMAGE]]]`, as a
/// failing test prints them. Tests without seeds or steps accept any number in these places.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Replay {
    seed: Option<u64>,
    step: Option<usize>,
    point: Option<usize>,
    image: Option<usize>,
}

impl Replay {
    pub(crate) fn from_environment() -> Self {
        if let Some(replay) = REPLAY_OVERRIDE.with_borrow(Clone::clone) {
            return replay;
        }
        std::env::var("PMEM_VOLUME_CRASH_SEED")
            .map_or_else(|_| Self::default(), |text| Self::parse(&text))
    }

    /// Returns true if only some of the images should be opened.
    fn is_selected(&self) -> bool {
        *self != Self::default()
    }

    /// Returns true if images of this step should be opened.
    pub(crate) fn has_step(&self, step: usize) -> bool {
        self.step.is_none_or(|only| only == step)
    }

    /// Counts the images of a whole test, and checks that there are at least `least`. If there are
    /// fewer, the simulator does not generate all images. A replay opens few images, but at least
    /// one.
    pub(crate) fn count(&self, images: usize, least: usize) {
        report_images(images);
        if self.is_selected() {
            assert!(images > 0, "{self:?} matches no image of this test");
        } else {
            assert!(
                images >= least,
                "only {images} images instead of {least}: the simulator tracks too little"
            );
        }
    }

    fn parse(text: &str) -> Self {
        let mut numbers =
            text.split(',').map(|number| number.trim().parse().expect("numbers with commas"));
        let mut next = || numbers.next();
        let index = |number: Option<u64>| number.map(|number| number as usize);
        Self { seed: next(), step: index(next()), point: index(next()), image: index(next()) }
    }
}

thread_local! {
    /// Replay numbers for this thread, which override the environment.
    static REPLAY_OVERRIDE: RefCell<Option<Replay>> = const { RefCell::new(None) };
}

/// Runs `run` as if the environment contained the numbers in the text of an error.
pub(crate) fn replayed<T>(error: &str, run: impl FnOnce() -> T) -> T {
    let (_, numbers) =
        error.split_once("PMEM_VOLUME_CRASH_SEED=").expect("the steps to reproduce it");
    let numbers = numbers.split(' ').next().expect("a word");
    REPLAY_OVERRIDE.set(Some(Replay::parse(numbers)));
    let result = run();
    REPLAY_OVERRIDE.set(None);
    result
}

/// Returns the seeds of a run, starting at 1. Their number is `usual`, or more in a soak test. A
/// replay uses only its own seed.
pub(crate) fn seeds(usual: u64) -> std::ops::RangeInclusive<u64> {
    if let Some(seed) = Replay::from_environment().seed {
        return seed..=seed;
    }
    let from_environment = std::env::var("PMEM_VOLUME_CRASH_SEEDS");
    1..=from_environment.map_or(usual, |seeds| seeds.parse().expect("a number of seeds"))
}

/// Adds the numbers for a replay to an error of [`verify_each`]. `seed` is 0 if the test has no
/// seed.
pub(crate) fn replay_as(seed: &str, step: usize, error: &str) -> String {
    let numbers: Vec<&str> = error
        .split(':')
        .next()
        .unwrap_or_default()
        .split(|c: char| !c.is_ascii_digit())
        .filter(|n| !n.is_empty())
        .collect();
    let numbers = numbers.join(",");
    format!(
        "{error}\nrun this test with PMEM_VOLUME_CRASH_SEED={seed},{step},{numbers} to reproduce it"
    )
}

static IMAGES: AtomicUsize = AtomicUsize::new(0);
static EQUAL_IMAGES: AtomicUsize = AtomicUsize::new(0);

/// Adds to the total number of images. It is printed when the test program exits, because the test
/// harness captures the output of passing tests.
pub(crate) fn report_images(count: usize) {
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(|| {
        // SAFETY: the function cannot unwind, because it ignores the result of its only fallible
        // call.
        unsafe { libc::atexit(print_total) };
    });
    IMAGES.fetch_add(count, Ordering::Relaxed);
}

extern "C" fn print_total() {
    let [images, equal] = [&IMAGES, &EQUAL_IMAGES].map(|count| count.load(Ordering::Relaxed));
    let _ = writeln!(std::io::stderr(), "\ncrash images equal to one that was opened: {equal}");
    let _ = writeln!(std::io::stderr(), "crash images opened: {images}");
}

/// For one in this many images, crashes during its recovery are tested too.
const RECOVERIES: usize = 16;
/// Maximum number of images per crash point of a recovery.
const RECOVERY_BOUND: usize = 8;

/// Opens up to `bound` images of each crash point. Returns the number of images that are distinct
/// within their points. An error contains the numbers of the point and the image. Equal `random`
/// generators produce equal images.
pub(crate) fn verify_each(
    points: &[CrashPoint],
    bound: usize,
    random: &mut Random,
    verify: &dyn Fn(&Simulator) -> Result<(), String>,
) -> Result<usize, String> {
    VerifiedImages::default().verify_each(points, bound, random, verify)
}

/// Images that were opened, identified by their content. Many images of a crash point are also
/// images of the next one. With the same oracle, equal images have the same result, so only one of
/// them is opened.
#[derive(Default)]
pub(crate) struct VerifiedImages {
    /// True if crashes during the recovery were verified too.
    images: HashMap<Digest, bool>,
}

impl VerifiedImages {
    /// Verifies up to `bound` images of each crash point, and skips images that were opened before.
    /// All calls must use the same oracle in `verify`.
    pub(crate) fn verify_each(
        &mut self,
        points: &[CrashPoint],
        bound: usize,
        random: &mut Random,
        verify: &dyn Fn(&Simulator) -> Result<(), String>,
    ) -> Result<usize, String> {
        let replay = Replay::from_environment();
        let before = self.images.len();
        for (index, point) in points.iter().enumerate() {
            let mut of_point = Random::new(random.below(u64::from(u32::MAX)));
            if replay.point.is_some_and(|only| only != index) {
                continue;
            }
            for (number, image) in point.images(bound, &mut of_point).into_iter().enumerate() {
                if replay.image.is_some_and(|only| only != number) {
                    continue;
                }
                let failed = |error| format!("point {index}, image {number}: {error}");
                let again = number % RECOVERIES == 0;
                if !self.is_selected(&image, again) {
                    continue;
                }
                if again {
                    image.record();
                }
                verify(&image).map_err(failed)?;
                if again {
                    self.verify_recovery(&image, number, verify).map_err(failed)?;
                }
            }
        }
        Ok(self.images.len() - before)
    }

    fn verify_recovery(
        &mut self,
        recovered: &Simulator,
        seed: usize,
        verify: &dyn Fn(&Simulator) -> Result<(), String>,
    ) -> Result<(), String> {
        for (index, point) in recovered.take_points().iter().enumerate() {
            let images = point.images(RECOVERY_BOUND, &mut Random::new((seed + index) as u64));
            for (number, image) in images.iter().enumerate() {
                if self.is_selected(image, false) {
                    verify(image).map_err(|error| {
                        format!(
                            "after a crash in recovery (point {index}, image {number}): {error}"
                        )
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Records an image. Returns false if an equal image was already verified at least as
    /// thoroughly.
    fn is_selected(&mut self, image: &Simulator, with_recovery: bool) -> bool {
        let digest = image.digest();
        let is_selected = match self.images.get(&digest) {
            None => true,
            Some(recovered) => with_recovery && !recovered,
        };
        if is_selected {
            self.images.insert(digest, with_recovery);
        } else {
            EQUAL_IMAGES.fetch_add(1, Ordering::Relaxed);
        }
        is_selected
    }
}

#[test]
fn replay_is_parsed_with_any_number_of_fields() {
    let replay = |seed, step, point, image| Replay { seed, step, point, image };
    assert!(!Replay::default().is_selected() && Replay::default().has_step(4));
    assert!(Replay::parse("0,3").is_selected() && !Replay::parse("0,3").has_step(4));
    assert_eq!(Replay::parse("7"), replay(Some(7), None, None, None));
    assert_eq!(Replay::parse("7,3"), replay(Some(7), Some(3), None, None));
    assert_eq!(Replay::parse("7, 3, 0, 12"), replay(Some(7), Some(3), Some(0), Some(12)));
}

#[test]
fn equal_images_are_verified_once_and_counted_once() {
    use crate::media::Media;
    let media = Simulator::new(4096);
    media.record();
    for word in 0..4 {
        media.store_word(word * 8, word + 1).unwrap();
        // Crash point at which nothing becomes durable. The next point includes all of its images.
        media.persist(&[]).unwrap();
    }
    let (points, calls) = (media.take_points(), RefCell::new(Vec::new()));
    assert_eq!(points.len(), 5);
    let verify = |image: &Simulator| {
        calls.borrow_mut().push(image.digest());
        Ok(())
    };
    let mut opened = VerifiedImages::default();
    let verify_points = |opened: &mut VerifiedImages| {
        opened.verify_each(&points, 100, &mut Random::new(1), &verify)
    };
    assert_eq!(verify_points(&mut opened).unwrap(), 16);
    let verified: HashSet<Digest> = calls.borrow().iter().copied().collect();
    assert_eq!((calls.take().len(), verified.len()), (16, 16));
    assert_eq!((verify_points(&mut opened).unwrap(), calls.take().len()), (0, 0));
    assert_eq!(verify_points(&mut VerifiedImages::default()).unwrap(), 16);
}

/// Generates images of 40 stores, and selects the one that `replay` opens again.
#[test]
fn image_is_replayed_by_its_numbers() {
    use crate::media::Media;
    let points = || {
        let media = Simulator::new(4096);
        media.record();
        (0..40).for_each(|word| media.store_word(word * 8, word + 1).unwrap());
        media.take_points()
    };
    let words = |image: &Simulator| {
        (0..40).map(|word| image.load_word(word * 8).unwrap()).collect::<Vec<_>>()
    };
    let verified = || {
        let verified = std::sync::Mutex::new(Vec::new());
        let record = |image: &Simulator| {
            verified.lock().unwrap().push(words(image));
            Ok(())
        };
        verify_each(&points(), 50, &mut Random::new(5), &record).unwrap();
        verified.into_inner().unwrap()
    };
    assert_eq!(verified(), verified());
    let wrong =
        |image: &Simulator| if words(image)[7] == 8 { Err("seven".to_owned()) } else { Ok(()) };
    let error = verify_each(&points(), 50, &mut Random::new(5), &wrong).unwrap_err();
    assert!(error.starts_with("point 0, image ") && error.ends_with(": seven"), "{error}");
    let (point_and_image, _) = error.split_once(':').unwrap();
    let image = point_and_image.rsplit(' ').next().unwrap();
    let replay = replay_as("5", 3, &error);
    assert!(replay.contains(&format!("PMEM_VOLUME_CRASH_SEED=5,3,0,{image} ")), "{replay}");
}
