//! Script of the picture for gnuplot.

use super::narrator::Event;
use super::prometheus::Range;
use super::table::{OTHER_VM, VM};

/// Names are written this far apart at least, as a part of the time axis, or they cover one
/// another.
const NAME_SPACING: f64 = 0.034;

/// The script: gnuplot runs it in the directory of timeline.csv.
pub(super) fn script(range: &Range, events: &[Event]) -> String {
    let times: Vec<f64> = events.iter().map(|event| event.elapsed_s).collect();
    let names_at = spread(&times, range.len_s() as f64);
    let marks = events.iter().zip(names_at).enumerate();
    let marks: String =
        marks.map(|(index, (event, name_at))| mark(index + 1, event, name_at)).collect();
    include_str!("timeline.gnuplot")
        .replace("@END@", &range.len_s().to_string())
        .replace("@MARKS@", &marks)
        .replace("@VM@", VM)
        .replace("@OTHER_VM@", OTHER_VM)
}

/// Positions of the names of events at these times, in the same order. They are apart from one
/// another, and on the time axis if there is room, otherwise near their times.
fn spread(times_s: &[f64], axis_s: f64) -> Vec<f64> {
    let spacing_s = axis_s * NAME_SPACING;
    // 1. To the right, away from the one before.
    let mut places_s = times_s.to_vec();
    for next in 1..places_s.len() {
        places_s[next] = places_s[next].max(places_s[next - 1] + spacing_s);
    }
    // 2. Back from the axis' end, where several happened close to it.
    let mut most_s = axis_s;
    for place_s in places_s.iter_mut().rev() {
        *place_s = place_s.min(most_s);
        most_s = *place_s - spacing_s;
    }
    places_s
}

/// A line through every panel, which leads to its name above the top one, past that one's title.
fn mark(number: usize, event: &Event, name_at: f64) -> String {
    let at = event.elapsed_s;
    let [past, lead] = [number + PAST_TITLE_FROM, number + LEADS_FROM];
    // gnuplot reads quotes and backslashes in a string; events are our own, and plain.
    let what: String = event.text.chars().filter(|c| !matches!(c, '"' | '\\')).collect();
    let style = "nohead back lw 1 lc rgb '#999999' dt 3";
    format!(
        "set arrow {number} from {at:.2}, graph 0 to {at:.2}, graph 1 {style}\n\
         set arrow {past} from {at:.2}, graph 1 to {at:.2}, screen top(0) + 0.026 {style}\n\
         set arrow {lead} from {at:.2}, screen top(0) + 0.026 to {name_at:.2}, screen top(0) + 0.036 {style}\n\
         set label {number} \"{what}\" at {name_at:.2}, screen top(0) + 0.041 rotate by 40 left noenhanced \
         font ',9' tc rgb '#333333'\n"
    )
}

/// Arrows with higher numbers are in the top panel alone: timeline.gnuplot takes them away after
/// it.
const PAST_TITLE_FROM: usize = 100;
const LEADS_FROM: usize = 200;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn names_are_apart_and_on_the_axis() {
        assert!(spread(&[], 100.0).is_empty());
        assert_eq!(spread(&[5.0, 50.0], 100.0), [5.0, 50.0]);
        assert_eq!(spread(&[5.0, 5.5, 30.0], 100.0), [5.0, 8.4, 30.0]);
        // At the end they make room to the left, and one that is far enough from them stays where
        // it was.
        let places = spread(&[40.0, 98.0, 99.0, 100.0], 100.0);
        for (place, expected) in places.iter().zip([40.0, 93.2, 96.6, 100.0]) {
            assert!((place - expected).abs() < 1e-9, "{places:?}");
        }
    }

    #[test]
    fn an_event_is_marked_and_nothing_is_left_to_fill_in() {
        let range = Range { start_s: 1000, end_s: 1100 };
        let time = Duration::ZERO;
        let event = |elapsed_s, text: &str| Event { time, elapsed_s, text: text.to_owned() };
        let script = script(&range, &[event(5.0, "one"), event(5.5, "a \"two\"")]);
        assert!(script.contains("set label 1 \"one\" at 5.00,"), "{script}");
        assert!(script.contains("set label 2 \"a two\" at 8.40,"), "{script}");
        assert!(!script.contains('@'), "{script}");
    }

    /// gnuplot draws nothing at all if a panel has no points, as after a demo that failed early.
    #[test]
    fn every_panel_has_points_without_data() {
        let script = script(&Range { start_s: 1000, end_s: 1100 }, &[]);
        let panels: Vec<&str> = script.lines().filter(|line| line.starts_with("plot ")).collect();
        assert_eq!(panels.len(), 5);
        assert!(panels.iter().all(|panel| panel.starts_with("plot 0 with lines")), "{panels:?}");
    }
}
