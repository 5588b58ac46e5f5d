/* Completion queues, and the channels that wake a program that waits for completions. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#include "fake.h"

struct entry {
	struct entry *next;
	struct ibv_wc completion;
};

struct queue {
	struct ibv_cq seen;
	struct entry *first, **last;
	bool armed;
};

struct channel {
	struct ibv_comp_channel seen;
	int bell; /* the other end of seen.fd */
};

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
	struct channel *channel = calloc(1, sizeof(*channel));
	int ends[2];

	if (!channel || pipe2(ends, O_CLOEXEC) != 0) {
		free(channel);
		return NULL;
	}
	channel->seen.context = context;
	channel->seen.fd = ends[0];
	channel->bell = ends[1];
	return &channel->seen;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *given)
{
	struct channel *channel = (struct channel *)given;

	if (given->refcnt)
		return EBUSY;
	close(given->fd);
	close(channel->bell);
	free(channel);
	return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *cq_context, struct ibv_comp_channel *channel,
			     int vector)
{
	struct queue *queue = calloc(1, sizeof(*queue));

	(void)vector;
	if (!queue)
		return NULL;
	queue->seen.context = context;
	queue->seen.channel = channel;
	queue->seen.cq_context = cq_context;
	queue->seen.cqe = entries;
	queue->last = &queue->first;
	pthread_mutex_init(&queue->seen.mutex, NULL);
	pthread_cond_init(&queue->seen.cond, NULL);
	if (channel)
		channel->refcnt++;
	return &queue->seen;
}

int ibv_destroy_cq(struct ibv_cq *cq)
{
	struct queue *queue = (struct queue *)cq;
	struct entry *entry;

	while ((entry = queue->first)) {
		queue->first = entry->next;
		free(entry);
	}
	if (cq->channel)
		cq->channel->refcnt--;
	free(queue);
	return 0;
}

void completion_add(struct ibv_cq *cq, const struct ibv_wc *completion)
{
	struct queue *queue = (struct queue *)cq;
	struct entry *entry = calloc(1, sizeof(*entry));

	if (!entry)
		abort();
	entry->completion = *completion;
	pthread_mutex_lock(&cq->mutex);
	*queue->last = entry;
	queue->last = &entry->next;
	if (queue->armed && cq->channel) {
		queue->armed = false;
		(void)!write(((struct channel *)cq->channel)->bell, &cq, sizeof(struct ibv_cq *));
	}
	pthread_mutex_unlock(&cq->mutex);
}

int completions_poll(struct ibv_cq *cq, int room, struct ibv_wc *into)
{
	struct queue *queue = (struct queue *)cq;
	struct entry *entry;
	int count = 0;

	pthread_mutex_lock(&cq->mutex);
	while (count < room && (entry = queue->first)) {
		into[count++] = entry->completion;
		queue->first = entry->next;
		if (!queue->first)
			queue->last = &queue->first;
		free(entry);
	}
	pthread_mutex_unlock(&cq->mutex);
	return count;
}

/* Completions that are there already do not ring; the program polls once more after this. */
int completions_arm(struct ibv_cq *cq, int solicited_only)
{
	(void)solicited_only;
	pthread_mutex_lock(&cq->mutex);
	((struct queue *)cq)->armed = true;
	pthread_mutex_unlock(&cq->mutex);
	return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context)
{
	if (read(channel->fd, cq, sizeof(struct ibv_cq *)) != sizeof(struct ibv_cq *))
		return -1;
	*cq_context = (*cq)->cq_context;
	return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count)
{
	pthread_mutex_lock(&cq->mutex);
	cq->comp_events_completed += count;
	pthread_mutex_unlock(&cq->mutex);
}
