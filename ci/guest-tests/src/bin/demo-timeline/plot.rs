//! What gnuplot is told.

use crate::prometheus::Range;
use crate::table::{OTHER_VM, VM};

/// Something that happened.
#[derive(Debug, Clone)]
pub struct Event {
    pub elapsed_s: f64,
    pub what: String,
}

/// Names are written this far apart at least, as a part of the time axis, or they cover one another.
const NAME_SPACING: f64 = 0.026;

/// The script: gnuplot runs it in the directory of timeline.csv.
pub fn script(range: &Range, events: &[Event]) -> String {
    let spacing_s = range.len_s() as f64 * NAME_SPACING;
    let mut marks = String::new();
    let mut name_at = f64::NEG_INFINITY;
    for (index, event) in events.iter().enumerate() {
        name_at = event.elapsed_s.max(name_at + spacing_s);
        marks += &mark(index + 1, event, name_at);
    }
    include_str!("timeline.gnuplot")
        .replace("@END@", &range.len_s().to_string())
        .replace("@MARKS@", &marks)
        .replace("@VM@", VM)
        .replace("@OTHER_VM@", OTHER_VM)
}

/// A line through every panel, which leads to its name above the top one.
fn mark(number: usize, event: &Event, name_at: f64) -> String {
    let at = event.elapsed_s;
    let lead = number + LEADS_FROM;
    // gnuplot reads quotes and backslashes in a string; events are our own, and plain.
    let what: String = event.what.chars().filter(|c| !matches!(c, '"' | '\\')).collect();
    format!(
        "set arrow {number} from {at:.2}, graph 0 to {at:.2}, graph 1 nohead back lw 1 lc rgb '#999999' dt 3\n\
         set arrow {lead} from {at:.2}, graph 1 to {name_at:.2}, graph 1.06 nohead lw 1 lc rgb '#999999' dt 3\n\
         set label {number} \"{what}\" at {name_at:.2}, graph 1.09 rotate by 40 left noenhanced font ',9' tc rgb '#555555'\n"
    )
}

/// Arrows with higher numbers are in the top panel alone: timeline.gnuplot takes them away after it.
const LEADS_FROM: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_events_at_once_are_apart_and_nothing_is_left_to_fill_in() {
        let range = Range::new(1000.0, 1100.0).unwrap();
        let event = |elapsed_s, what: &str| Event { elapsed_s, what: what.to_owned() };
        let script = script(&range, &[event(5.0, "one"), event(5.5, "a \"two\"")]);
        assert!(script.contains("set label 1 \"one\" at 5.00,"), "{script}");
        assert!(script.contains("set label 2 \"a two\" at 7.60,"), "{script}");
        assert!(!script.contains('@'), "{script}");
    }
}
